"""One hand-over, measured: the chunks of a prompt's KV, from this process into another one's landing."""

from __future__ import annotations

import random
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdhub.api import Grant, Peer, Region, Transfer, TransferState, Transport, TransportSpec, WriteOp
from pdhub.api.errors import ConfigError, TransferFailed
from pdhub.api.layout import KVLayout
from pdhub.core.handoff import chunk_bytes, plan_chunk
from pdhub.measure.far import FarSide

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Work:
    """What is handed over.

    Args:
        layout, tokens: of the prompt's KV.
        chunk: tokens that prefill computes, and the sender sends, at a time.
        prefill_per_s: tokens that prefill is assumed to compute a second.
        source, target: devices of the two sides.
    """

    layout: KVLayout
    tokens: int
    chunk: int
    prefill_per_s: float
    source: str = "cpu"
    target: str = "cpu"

    @property
    def nbytes(self) -> int:
        return self.layout.landing_bytes(self.tokens)

    def chunks(self) -> list[tuple[int, int]]:
        return [(start, min(start + self.chunk, self.tokens)) for start in range(0, self.tokens, self.chunk)]


@dataclass(frozen=True)
class Sample:
    """Seconds of one run. ``sent_s``: every byte, as fast as it goes. ``streamed_s`` and ``afterwards_s``: from the end
    of prefill to the last byte, if chunks are sent as they are computed, and if all are sent at the end. CPU seconds
    are those of the fast run."""

    sent_s: float
    streamed_s: float
    afterwards_s: float
    sender_cpu_s: float
    target_cpu_s: float


@dataclass(frozen=True)
class Result:
    """Medians over the runs."""

    transport: str
    work: Work
    writes: int
    verified: bool
    samples: tuple[Sample, ...]

    def row(self) -> dict[str, Any]:
        """For JSON. Seconds, bytes, and GB/s of 10^9 bytes."""
        middle = {
            name: statistics.median(getattr(sample, name) for sample in self.samples)
            for name in ("sent_s", "streamed_s", "afterwards_s", "sender_cpu_s", "target_cpu_s")
        }
        speeds = [self.work.nbytes / sample.sent_s / 1e9 for sample in self.samples]
        return {
            "transport": self.transport,
            "layout": self.work.layout.model,
            "order": self.work.layout.order.value,
            "tokens": self.work.tokens,
            "chunk": self.work.chunk,
            "bytes": self.work.nbytes,
            "writes": self.writes,
            "verified": self.verified,
            "runs": len(self.samples),
            "gb_s": round(statistics.median(speeds), 3),
            "gb_s_slowest": round(min(speeds), 3),
            "gb_s_fastest": round(max(speeds), 3),
            "prefill_s": round(self.work.tokens / self.work.prefill_per_s, 6),
            "exposed_s": round(middle["streamed_s"], 6),
            "exposed_if_sent_at_the_end_s": round(middle["afterwards_s"], 6),
            "sender_cpu_s": round(middle["sender_cpu_s"], 6),
            "target_cpu_s": round(middle["target_cpu_s"], 6),
        }


class Bench:
    """Both sides of one transport.

    Args:
        spec, options: the transport, as in YAML.
        work: what to hand over.
    """

    def __init__(self, spec: TransportSpec, options: Mapping[str, Any], work: Work) -> None:
        self._spec = spec
        self._work = work
        self._transport: Transport = spec.factory(spec.config.model_validate(dict(options)))
        self._far: FarSide | None = None
        self._peer: Peer | None = None
        try:
            self._most = self._transport.open().max_ops or sys.maxsize
            self._far = FarSide(spec.name, options)
            self._source = self._allocated()
            self._ops = [self._plan(start, stop) for start, stop in work.chunks()]
        except BaseException:
            self.close()
            raise

    def _allocated(self) -> Region:
        try:
            return self._transport.allocate(self._work.nbytes, self._work.source)
        except ValueError as error:
            hint = "cpu, or cuda:N with a transport that moves such memory"
            raise ConfigError(str(error), where="--source", hint=hint) from error

    def run(self, runs: int, told: Callable[[], None] = lambda: None) -> Result:
        """Measure ``runs`` times after one run that is verified and not counted. ``told`` is called after each."""
        verified = self._verify()
        told()
        samples = []
        for _ in range(runs):
            samples.append(self._sample())
            told()
        writes = sum(len(ops) for ops in self._ops)
        return Result(self._spec.name, self._work, writes, verified, tuple(samples))

    def close(self) -> None:
        """End both sides. Idempotent."""
        self._transport.close()
        if self._far is not None:
            self._far.close()

    def _plan(self, start: int, stop: int) -> list[WriteOp]:
        """Writes of one chunk. Chunks are staged one after the other in the source."""
        work = self._work
        base = sum(chunk_bytes(work.layout, a, b, work.tokens) for a, b in work.chunks() if a < start)
        return [
            WriteOp(self._source, base + move.source, move.destination, move.nbytes)
            for move in plan_chunk(work.layout, work.tokens, start, stop, work.tokens)
        ]

    def _verify(self) -> bool:
        """Hand over random bytes; False if the memory cannot be read from here. Raises TransferFailed."""
        if self._source.view is None:
            self._hand_over(0.0, self._ops)
            return False
        # Small patterns over and over, each chunk its own: quick to make, and a misplaced chunk shows.
        view = self._source.view
        page = random.Random(0).randbytes(1 << 16)
        for start in range(0, len(view), len(page)):
            part = bytes(byte ^ (start >> 16 & 0xFF) for byte in page[:256]) + page[256:]
            view[start : start + len(page)] = part[: len(view) - start]
        expected = bytearray(len(view))
        for op in (op for ops in self._ops for op in ops):
            expected[op.remote_offset : op.remote_offset + op.nbytes] = view[
                op.local_offset : op.local_offset + op.nbytes
            ]
        grant, far = self._landing()
        self._send(grant, self._ops)
        found = far.checksum(grant)
        far.free(grant)
        if found is not None and found != zlib.crc32(expected):
            raise TransferFailed(f"{self._spec.name}: what arrived is not what was sent")
        return found is not None

    def _sample(self) -> Sample:
        assert self._far is not None
        sender, target = time.process_time(), self._far.cpu_s()
        sent = self._hand_over(0.0, self._ops)
        sender, target = time.process_time() - sender, self._far.cpu_s() - target
        each = self._work.chunk / self._work.prefill_per_s
        return Sample(
            sent_s=sent,
            streamed_s=self._hand_over(each, self._ops),
            afterwards_s=self._hand_over(0.0, [[op for ops in self._ops for op in ops]]),
            sender_cpu_s=sender,
            target_cpu_s=target,
        )

    def _hand_over(self, each_s: float, chunks: Sequence[Sequence[WriteOp]]) -> float:
        """Seconds from the moment that the last chunk is there to the last byte; a chunk is there every ``each_s``."""
        grant, far = self._landing()
        start = time.perf_counter()
        self._send(grant, chunks, each_s)
        exposed = time.perf_counter() - start - each_s * len(chunks)
        far.free(grant)
        return exposed

    def _landing(self) -> tuple[Grant, FarSide]:
        """A fresh landing at the other side, which is connected."""
        assert self._far is not None
        grant, metadata = self._far.landing(self._work.nbytes, self._work.target)
        self._peer = self._peer or self._transport.connect(metadata)
        self._peer.prepare(grant)  # as a sender that joins
        return grant, self._far

    def _send(self, grant: Grant, chunks: Sequence[Sequence[WriteOp]], each_s: float = 0.0) -> None:
        start = time.perf_counter()
        posted: list[Transfer] = []
        assert self._peer is not None
        for number, ops in enumerate(chunks, 1):
            wait = start + each_s * number - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            for first in range(0, len(ops), self._most):
                posted.append(self._transport.write(self._peer, grant, ops[first : first + self._most]))
        for transfer in posted:
            if transfer.wait(PATIENCE_S) is not TransferState.DONE:
                raise TransferFailed(f"{self._spec.name}: a write ended as {transfer.state}: {transfer.error}")
