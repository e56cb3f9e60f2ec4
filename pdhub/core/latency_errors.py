"""How good predictions were: predicted against observed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

KEPT: Final = 256

LEAST: Final = 16
"""Comparisons before they say how wrong a prediction may be."""

LATE_SHARE: Final = 0.95
AGAIN: Final = 16
"""After so many more comparisons they are looked at again."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Of the last predictions of one metric in one pool.

    Args:
        count: how many of them.
        p50_error_ms, p90_error_ms: absolute error.
        p50_ratio, p90_ratio: the larger of predicted/observed and observed/predicted; 1 is perfect.
        bias: median of predicted/observed; above 1 = too pessimistic.
    """

    count: int
    p50_error_ms: float
    p90_error_ms: float
    p50_ratio: float
    p90_ratio: float
    bias: float


class Errors:
    """The last pairs of one metric in one pool."""

    __slots__ = ("_late", "_new", "_pairs")

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._late: float | None = None
        self._new = 0

    def add(self, predicted: float, observed: float) -> None:
        if predicted > 0 and observed > 0:
            self._pairs.append((predicted, observed))
            self._new += 1
            if self._new >= AGAIN or (self._late is None and len(self._pairs) >= LEAST):
                self._new = 0
                self._late = _at(sorted(o / p for p, o in self._pairs), LATE_SHARE)

    @property
    def late(self) -> float | None:
        """What was predicted took at most so many times as long, 19 times of 20; None while too little is known."""
        return self._late

    def summary(self) -> Calibration | None:
        """None while nothing was compared."""
        if not self._pairs:
            return None
        errors = sorted(abs(p - o) for p, o in self._pairs)
        ratios = sorted(max(p / o, o / p) for p, o in self._pairs)
        signed = sorted(p / o for p, o in self._pairs)
        return Calibration(
            count=len(errors),
            p50_error_ms=_at(errors, 0.5),
            p90_error_ms=_at(errors, 0.9),
            p50_ratio=_at(ratios, 0.5),
            p90_ratio=_at(ratios, 0.9),
            bias=_at(signed, 0.5),
        )


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
