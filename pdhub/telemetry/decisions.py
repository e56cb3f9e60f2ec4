"""Every decision is data: as one JSON document, in memory for a while, and a sample of them as JSON lines."""

from __future__ import annotations

import json
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdhub.api.errors import ConfigError
from pdhub.api.policy import Candidate, Decision, Prediction
from pdhub.api.request import RequestRecord, RequestView
from pdhub.telemetry.observer import Observer

log = logging.getLogger("pdhub.decisions")


@dataclass(slots=True)
class Entry:
    """One request's decision, the latest if it was decided again.

    Args:
        version: of the rules that decided. looks: how often the policy was asked. record: how it ended; None = not yet.
    """

    request: RequestView
    decision: Decision
    version: str
    looks: int = 1
    record: RequestRecord | None = None

    @property
    def id(self) -> str:
        return self.request.id

    def document(self) -> dict[str, Any]:
        """The JSON of ``/debug/decisions`` and of the decision log. Nothing that the client said is in it but numbers,
        the model and names of classes and tenants."""
        out = {**decision_document(self.decision), "version": self.version, "looks": self.looks}
        out["request"] = request_document(self.request)
        out["outcome"] = None if self.record is None else outcome_document(self.record)
        return out


def decision_document(decision: Decision) -> dict[str, Any]:
    """``pool``, ``node``, ``reason``, ``policy``, ``rule``, ``order`` (best first) and ``candidates``."""
    return {
        "pool": decision.pool,
        "node": decision.node,
        "reason": decision.reason.value,
        "policy": decision.policy,
        "rule": decision.rule,
        "order": [list(pair) for pair in decision.order],
        "candidates": [_candidate(c) for c in decision.candidates],
    }


def request_document(request: RequestView) -> dict[str, Any]:
    """What the policy knew of the request, without its headers and its prompt's digests."""
    slo = request.slo
    return {
        "id": request.id,
        "model": request.model,
        "endpoint": request.endpoint,
        "prompt_tokens": request.prompt_tokens,
        "max_tokens": request.max_tokens,
        "features": sorted(request.features),
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "slo_class": slo.slo_class, "source": slo.source},
        "stream": request.stream,
        "tenant": request.tenant,
        "priority": request.priority,
        **({"cached": dict(request.cached)} if request.cached else {}),
    }


def outcome_document(record: RequestRecord) -> dict[str, Any]:
    """What came of it, to be compared with what was predicted."""
    return {
        "outcome": record.outcome,
        "error_code": record.error_code,
        "pool": record.pool,
        "node": record.node,
        "prefill": record.prefill,
        "reason": record.reason,
        "attempts": record.attempts,
        "queued_ms": _short(record.queued_ms),
        "ttft_ms": _short(record.ttft_ms),
        "tpot_ms": _short(record.tpot_ms),
        "itl_p99_ms": _short(record.itl_p99_ms),
        "predicted_ttft_ms": _short(record.predicted_ttft_ms),
        "predicted_tpot_ms": _short(record.predicted_tpot_ms),
        "total_ms": _short(record.total_ms),
        "completion_tokens": record.completion_tokens,
        **({"estimated": list(record.estimated)} if record.estimated else {}),
        "tier": record.tier,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "pool": candidate.pool,
        "node": candidate.node,
        "kept": candidate.kept,
        "dropped_by": candidate.dropped_by,
        "why": candidate.why,
        "scores": {name: _short(value) for name, value in candidate.scores.items()},
        "predicted": _prediction(candidate.predicted),
    }


def _prediction(predicted: Prediction | None) -> dict[str, float | None] | None:
    return None if predicted is None else {name: _short(value) for name, value in predicted._asdict().items()}


def _short(value: float | None) -> float | None:
    """Four significant digits after the point; JSON knows neither infinity nor NaN."""
    return None if value is None or value != value or value in (float("inf"), -float("inf")) else round(value, 4)


class DecisionLog:
    """Args:
    keep: decisions that are kept in memory for ``/debug/decisions``.
    sample: share of requests whose decision is handed to ``write`` when they end; always the same requests for the
        same ids.
    write: called in a thread of its own, so that no request waits for a disk; None = nobody writes.
    """

    def __init__(self, keep: int = 0, sample: float = 0.0, write: Callable[[Entry], None] | None = None) -> None:
        self._kept: deque[Entry] = deque(maxlen=keep)
        self._sample = sample if write is not None else 0.0
        self._worker = Observer(write) if write is not None and sample > 0 else None

    @property
    def dropped(self) -> int:
        """Lines that were not written because the writer did not keep up."""
        return self._worker.dropped if self._worker is not None else 0

    def note(self, entry: Entry | None, request: RequestView, decision: Decision, version: str) -> Entry | None:
        """A request was decided; again, if it has an entry. Returns its entry; None if nobody wants to know."""
        if entry is not None:
            entry.decision = decision
            entry.looks += 1
            return entry
        if not (self._kept.maxlen or self._sampled(request.id)):
            return None
        entry = Entry(request, decision, version)
        self._kept.append(entry)
        return entry

    def ended(self, entry: Entry, record: RequestRecord) -> None:
        """The request ended."""
        entry.record = record
        if self._worker is not None and self._sampled(record.id):
            self._worker.offer(entry)

    def recent(self) -> Iterable[Entry]:
        """Newest first."""
        return reversed(self._kept)

    def close(self) -> None:
        """Write what waits, then stop. Idempotent."""
        if self._worker is not None:
            self._worker.close()

    def _sampled(self, id: str) -> bool:
        return self._sample > 0 and zlib.crc32(id.encode()) < self._sample * (1 << 32)


def to_logger(entry: Entry) -> None:
    """One line of JSON to the logger ``pdhub.decisions``."""
    log.info("%s", _line(entry))


class DecisionFile:
    """One line of JSON a decision, appended.

    Args:
        limit_bytes: when the file would grow beyond it, it becomes ``<name>.1`` (an older one is lost) and a new one
            begins: the disk holds at most twice as much.

    Raises:
        ConfigError: it cannot be opened for writing.
    """

    def __init__(self, path: str | Path, limit_bytes: int) -> None:
        self._path = Path(path)
        self._limit = limit_bytes
        self._failing = False
        try:
            with self._path.open("ab"):
                pass
        except OSError as error:
            hint = "give the path of a file in a directory that the router may write to"
            raise ConfigError(f"the decision log '{path}' cannot be written: {error.strerror}", hint=hint) from None

    def __call__(self, entry: Entry) -> None:
        """Append. A disk that fails is reported once until it works again; requests do not notice."""
        line = _line(entry).encode() + b"\n"
        try:
            if self._path.exists() and self._path.stat().st_size + len(line) > self._limit:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
            with self._path.open("ab") as file:
                file.write(line)
        except OSError as error:
            if not self._failing:
                log.error("the decision log '%s' cannot be written: %s", self._path, error.strerror)
            self._failing = True
        else:
            self._failing = False


def _line(entry: Entry) -> str:
    return json.dumps(entry.document(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
