"""A node's and a sender's instance of the transport under test, and what rules do with them."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from pdhub.api import (
    Grant,
    OnDone,
    Peer,
    Region,
    Transfer,
    TransferFailed,
    TransferState,
    Transport,
    TransportSpec,
    WriteOp,
)

PATIENCE_S = 20.0
"""Bound on anything that must end; generous, because it is no measurement."""

FINAL = (TransferState.DONE, TransferState.FAILED, TransferState.ABORTED)


def peek(region: Region, offset: int = 0, nbytes: int | None = None) -> bytes:
    """Bytes of a region that is in host memory."""
    nbytes = region.nbytes - offset if nbytes is None else nbytes
    return ctypes.string_at(region.address + offset, nbytes)


def holds(region: Region, data: bytes) -> bool:
    """The region's content is ``data``. Rules assert this and not the comparison itself: to explain how two megabytes
    differ takes an assertion minutes."""
    return peek(region) == data


def poke(region: Region, data: bytes, offset: int = 0) -> None:
    """Write into a region that is in host memory."""
    assert offset + len(data) <= region.nbytes
    ctypes.memmove(region.address + offset, data, len(data))


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Bytes without a period that a shifted or repeated copy could hide in."""
    return random.Random(seed).randbytes(nbytes)


def until(condition: Callable[[], bool], what: str, patience_s: float | None = None) -> None:
    """Wait for ``condition``; AssertionError saying ``what`` did not happen."""
    deadline = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in time"
        time.sleep(0.002)


@dataclass(frozen=True)
class Target:
    """A region at the node and the right to write into it."""

    region: Region
    grant: Grant


class TransportPair:
    """Two opened instances in this process: ``node`` receives, ``sender`` writes through ``peer``.

    Args:
        spec, config: the transport under test.
    """

    def __init__(self, spec: TransportSpec, config: BaseModel) -> None:
        self.spec = spec
        self.config = config
        self._made: list[Transport] = []
        self.node = self.make()
        self.caps = self.node.open()
        self.sender = self.make()
        self.sender.open()
        self.peer: Peer = self.sender.connect(self.node.export_metadata())

    def make(self) -> Transport:
        """A further, unopened instance; closed with the pair."""
        transport: Transport = self.spec.factory(self.config)
        self._made.append(transport)
        return transport

    def target(self, nbytes: int, fill: int = 0) -> Target:
        """A fresh region at the node, granted."""
        region = self.node.allocate(nbytes)
        poke(region, bytes([fill]) * nbytes)
        return Target(region, self.node.grant(region.id, "writer"))

    def source(self, data: bytes) -> Region:
        """A region at the sender that holds ``data``."""
        region = self.sender.allocate(len(data))
        poke(region, data)
        return region

    def post(self, target: Target, ops: Sequence[WriteOp], on_done: OnDone | None = None) -> Transfer:
        return self.sender.write(self.peer, target.grant, ops, on_done=on_done)

    def write(self, target: Target, data: bytes, offset: int = 0) -> Transfer:
        """Post ``data`` for ``offset`` and wait until it is done."""
        transfer = self.post(target, [WriteOp(self.source(data), 0, offset, len(data))])
        done(transfer)
        return transfer

    def refused(self, grant: Grant, ops: Sequence[WriteOp]) -> bool:
        """The write was refused: raised, or failed at the target."""
        try:
            transfer = self.sender.write(self.peer, grant, ops)
        except (TransferFailed, ValueError):
            return True
        return transfer.wait(PATIENCE_S) is TransferState.FAILED

    def close(self) -> None:
        for transport in reversed(self._made):
            transport.close()


def done(transfer: Transfer) -> None:
    """Wait; AssertionError unless it was done."""
    state = transfer.wait(PATIENCE_S)
    assert state is TransferState.DONE, f"the write ended {state}: {transfer.error!r}"


def first_byte(target: Target, fill: int) -> None:
    """Wait until a long write with ``fill`` is under way."""
    until(lambda: peek(target.region, 0, 1) == bytes([fill]), "the first byte")


def long_write(pair: TransportPair, nbytes: int, fill: int) -> list[WriteOp]:
    """Operations over one range, again and again, that take a second or more on any machine."""
    source = pair.source(bytes([fill]) * nbytes)
    return repeat(WriteOp(source, 0, 0, nbytes), pair.caps.max_ops)


def repeat(op: WriteOp, max_ops: int, total: int = 24 << 30) -> list[WriteOp]:
    """``op`` as often as makes ``total`` bytes, within the transport's limit."""
    times = max(1, total // op.nbytes)
    return [op] * (min(times, max_ops) if max_ops else times)
