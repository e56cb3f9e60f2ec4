"""How much slower than its pool's shape a node is just now, as a logarithm.

The median of the last few observations, newer ones heavier: a few outliers change nothing, a jump is followed after
five observations.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from pdhub.core.latency_shape import TINY, Shape

WINDOW: Final = 11
ANCHOR: Final = 12.0
"""Weight of what was thought before; the newest observation has ``WINDOW``. One alone is never believed."""

HALF_LIFE_S: Final = 4.0
LEAST_WEIGHT: Final = 0.25
"""Age takes no more than this from an observation's weight: with little traffic one of them must not rule alone."""

NOISE: Final = 0.15
"""A difference from the anchor below this is mostly noise and mostly ignored; one well above it counts whole."""

BASE_SHARE: Final = 0.02
"""Weight of one observation in the long-run level."""

BASE_CLIP: Final = 0.25
"""Largest difference that one observation counts for there; a young level may take larger steps."""


class Level:
    """One node's, for one metric.

    ``base`` is the long-run level: it hardly moves in an incident.
    """

    __slots__ = ("_window", "base", "count", "last_s", "recent")

    def __init__(self) -> None:
        self._window: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW)
        self.base = 0.0
        self.recent = 0.0
        self.count = 0
        self.last_s = -math.inf

    def add(self, at_s: float, u: float, v: float, time: float) -> None:
        self._window.append((at_s, u, v, time))
        self.last_s = max(self.last_s, at_s)
        self.count += 1

    def settle(self, shape: Shape, anchor: float, now: float, stale_s: float) -> None:
        """Recompute ``recent`` against the shape as it is now.

        Args:
            anchor: what to believe while there is hardly any evidence.
        """
        weighted = [(anchor, ANCHOR)]
        total = ANCHOR
        rank = WINDOW
        for at_s, u, v, time in reversed(self._window):
            age = max(0.0, now - at_s)
            if age > stale_s:
                break
            weight = rank * max(LEAST_WEIGHT, 0.5 ** (age / HALF_LIFE_S))
            weighted.append((_ratio(shape, u, v, time), weight))
            total += weight
            rank -= 1
        weighted.sort()
        half, seen = total / 2, 0.0
        for value, weight in weighted:
            seen += weight
            if seen >= half:
                off = value - anchor
                self.recent = anchor + off * off * off / (off * off + NOISE * NOISE)
                return

    def drift(self, shape: Shape, u: float, v: float, time: float) -> None:
        """Let the long-run level follow one observation a little."""
        share = max(BASE_SHARE, 0.5 / self.count)
        clip = max(BASE_CLIP, 8 / self.count)
        error = _ratio(shape, u, v, time) - self.base
        self.base += share * min(clip, max(-clip, error))


def _ratio(shape: Shape, u: float, v: float, time: float) -> float:
    expected = shape.value(u, v)
    return math.log(time / expected) if expected > TINY else 0.0
