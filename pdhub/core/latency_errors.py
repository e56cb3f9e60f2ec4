"""How good predictions were: predicted against observed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

KEPT: Final = 256


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

    __slots__ = ("_pairs",)

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def add(self, predicted: float, observed: float) -> None:
        if predicted > 0 and observed > 0:
            self._pairs.append((predicted, observed))

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
