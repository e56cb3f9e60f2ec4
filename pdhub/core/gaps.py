"""Gaps between the tokens of one answer, as a histogram: small, whatever the answer's length."""

from __future__ import annotations

import math
from typing import Final

_LEAST_S: Final = 1e-5
_STEPS: Final = 16
"""Buckets for each doubling: a quantile is at most 4.4 % too high."""


class Gaps:
    """Tokens that came in one piece have a gap of nothing between them, as clients see it."""

    __slots__ = ("_count", "_counts", "_most_s")

    def __init__(self) -> None:
        self._count = 0
        self._counts: dict[int, int] = {}
        self._most_s = 0.0

    def add(self, gap_s: float, tokens: int = 1) -> None:
        """``tokens`` came together, ``gap_s`` after the one before."""
        self._count += tokens
        if gap_s > _LEAST_S:
            bucket = int(math.log2(gap_s / _LEAST_S) * _STEPS)
            self._counts[bucket] = self._counts.get(bucket, 0) + 1
            self._most_s = max(self._most_s, gap_s)

    def quantile(self, q: float) -> float | None:
        """Seconds that the share ``q`` of the gaps does not exceed; None if there was no gap.

        Args:
            q: 0 to 1.
        """
        if not self._count:
            return None
        above = self._count - max(1, math.ceil(q * self._count))
        for bucket in sorted(self._counts, reverse=True):
            above -= self._counts[bucket]
            if above < 0:
                return min(self._most_s, _LEAST_S * math.exp2((bucket + 1) / _STEPS))
        return 0.0
