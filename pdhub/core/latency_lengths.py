"""How long answers are: what a running request may still produce, given what it has produced."""

from __future__ import annotations

import math
from typing import Final

STEPS: Final = 4
"""Buckets an octave."""

BUCKETS: Final = 84
GROWTH: Final = 1.01
"""Each answer weighs this much more than the one before: a memory of about 100."""

MAX_WEIGHT: Final = 1e12

ENOUGH: Final = 8
"""Answers until the learned lengths replace the seed."""


class Lengths:
    """Args:
    seed: mean tokens of an answer while too few have ended; None = unknown.
    """

    __slots__ = ("_counts", "_means", "_weight", "count", "seed")

    def __init__(self, seed: float | None = None) -> None:
        self.seed = seed
        self.count = 0
        self._weight = 1.0
        self._counts = [0.0] * BUCKETS
        self._means: list[float | None] | None = None

    def add(self, tokens: int) -> None:
        """An answer ended with ``tokens``."""
        if tokens <= 0:
            return
        self.count += 1
        self._counts[_bucket(tokens)] += self._weight
        self._weight *= GROWTH
        if self._weight > MAX_WEIGHT:
            self._counts = [c / MAX_WEIGHT for c in self._counts]
            self._weight /= MAX_WEIGHT
        self._means = None

    def mean(self) -> float | None:
        """Tokens of an answer; None = unknown."""
        return self.remaining(0)

    def remaining(self, produced: int, cap: int | None = None) -> float | None:
        """Tokens that a request which has produced ``produced`` is expected to add.

        Args:
            cap: its limit on the whole answer.
        """
        most = math.inf if cap is None else max(0.0, cap - produced)
        expected = self._expected(produced)
        if expected is None:
            return None if cap is None else most
        return min(most, expected)

    def _expected(self, produced: int) -> float | None:
        if self.count < ENOUGH:
            # Without a memory of its own: as long as ever.
            return self.seed
        if self._means is None:
            self._means = self._conditional()
        total = self._means[_bucket(produced) if produced > 0 else 0]
        if total is None:  # longer than any that was seen
            return max(1.0, produced / 2)
        return max(1.0, total - produced)

    def _conditional(self) -> list[float | None]:
        """By bucket: the mean of what is in it or above."""
        means: list[float | None] = [None] * BUCKETS
        weight = total = 0.0
        for i in reversed(range(BUCKETS)):
            weight += self._counts[i]
            total += self._counts[i] * _middle(i)
            if weight > 0:
                means[i] = total / weight
        return means


def _bucket(tokens: int) -> int:
    return min(BUCKETS - 1, int(math.log2(tokens) * STEPS))


def _middle(bucket: int) -> float:
    return float(2 ** ((bucket + 0.5) / STEPS))
