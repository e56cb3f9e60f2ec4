"""What a run came to: goodput, attainment, latencies, refusals, utilisation, cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pdhub.api.request import RequestRecord
from pdhub.core.latency import Calibration
from pdhub.simulate.workload import Arrival


@dataclass(frozen=True, slots=True)
class Done:
    """One request and how it ended. ``price``: of a token in the pool that served it."""

    request: Arrival
    record: RequestRecord
    price: float

    @property
    def good(self) -> bool:
        """Completed, and every target met; one without targets need only complete."""
        record = self.record
        if record.outcome != "ok":
            return False
        slo = record.slo
        if slo.ttft_ms is not None and (record.ttft_ms is None or record.ttft_ms > slo.ttft_ms):
            return False
        # A single token has no time between tokens.
        return not (slo.tpot_ms is not None and record.tpot_ms is not None and record.tpot_ms > slo.tpot_ms)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds; None = nothing was observed."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class ClassResult:
    """One service class, or all together. ``attainment``: good requests by all that came."""

    requests: int
    completed: int
    good: int
    attainment: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    refused: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PoolResult:
    """Args:
    utilisation: share of the time in which nodes ran anything. slots: mean share of slots in use.
    calibration: how good predictions were, by metric.
    """

    requests: int
    tokens: int
    utilisation: float
    slots: float
    calibration: Mapping[str, Calibration]


@dataclass(frozen=True, slots=True)
class Result:
    """One run.

    Args:
        goodput: good requests a second of the time in which requests came.
        offered: requests a second that came. cost: output tokens times their pool's cost; ``cost_per_good``: by good.
        targets: milliseconds by class, then by metric. curves: quantiles of a metric and class, for plots.
        series: for plots: (second, came, good).
    """

    policy: str
    seed: int
    span_s: float
    offered: float
    goodput: float
    total: ClassResult
    classes: Mapping[str, ClassResult]
    pools: Mapping[str, PoolResult]
    prefill_utilisation: float
    cost: float
    cost_per_good: float | None
    reasons: Mapping[str, int]
    targets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    series: Sequence[tuple[float, int, int]] = ()

    def data(self) -> dict[str, Any]:
        """For JSON, without what only plots need."""
        found = asdict(self)
        del found["curves"], found["series"]
        return found


def class_result(done: Sequence[Done]) -> ClassResult:
    ok = [d.record for d in done if d.record.outcome == "ok"]
    good = sum(d.good for d in done)
    return ClassResult(
        requests=len(done),
        completed=len(ok),
        good=good,
        attainment=good / len(done) if done else 1.0,
        ttft_ms=percentiles(r.ttft_ms for r in ok),
        tpot_ms=percentiles(r.tpot_ms for r in ok),
        refused=dict(Counter(d.record.error_code or "?" for d in done if d.record.outcome != "ok")),
    )


def percentiles(values: Iterable[float | None]) -> Percentiles:
    found = sorted(v for v in values if v is not None)
    if not found:
        return Percentiles()
    return Percentiles(*(found[min(len(found) - 1, int(share * len(found)))] for share in (0.5, 0.9, 0.99)))


def quantiles(values: Iterable[float | None], points: int = 100) -> list[float]:
    """``points + 1`` values from the smallest to the largest; empty if there are none."""
    found = sorted(v for v in values if v is not None)
    return [found[round(i * (len(found) - 1) / points)] for i in range(points + 1)] if found else []


def series(done: Sequence[Done], span_s: float, steps: int = 60) -> list[tuple[float, int, int]]:
    """By time of arrival: (second, came, good)."""
    width = max(span_s, 1e-9) / steps
    came, good = [0] * steps, [0] * steps
    for d in done:
        i = min(steps - 1, int(d.request.at_s / width))
        came[i] += 1
        good[i] += d.good
    return [((i + 0.5) * width, came[i], good[i]) for i in range(steps)]
