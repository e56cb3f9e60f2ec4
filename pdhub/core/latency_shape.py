"""How a time grows with two features: ``time = c0 + c1 * u + c2 * v``, no coefficient negative.

Learned by least squares of relative errors with forgetting. Coefficients that the data do not speak of stay where
the seeds put them: a ridge pulls each one there, so nothing runs away however little the features vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MEMORY: Final = 200
"""Observations; a young shape forgets its first steps sooner."""

SETTLED: Final = 16
"""After that many observations the scale stays and only the form is learned: how slow things are is the levels'."""

RIDGE: Final = 0.05
"""Strength of the pull to a coefficient's seed, in observations, where nothing was seeded."""

SEED_SPREAD: Final = 0.5
"""A seed is trusted as a value with this relative spread."""

NEGLIGIBLE: Final = 1e-3
"""A seed that explains no more of a typical time than this share is none."""

TINY: Final = 1e-12
"""Milliseconds: taken for zero."""

MOST: Final = 1e9
"""Milliseconds: no coefficient is larger."""

CLIP: Final = 0.5
"""Largest relative error that one observation counts for."""

Coefficients = tuple[float, float, float]


class Shape:
    """Args:
    seed: the coefficients that the configuration gives; None = not given.
    """

    __slots__ = ("_b", "_means", "_s", "coefficients", "count", "seed", "seeded")

    def __init__(self, seed: Sequence[float | None] = (None, None, None)) -> None:
        a, b, c = (x if x is not None and x > TINY else 0.0 for x in seed)
        self.seed: Coefficients = (a, b, c)
        self.seeded = any(self.seed)
        self.coefficients = self.seed
        self.count = 0
        self._s = [0.0] * 6  # 00 01 02 11 12 22
        self._b = [0.0] * 3
        self._means = [0.0, 0.0, 0.0, 0.0]  # of 1, u, v and the time

    @property
    def known(self) -> bool:
        return self.seeded or self.count > 0

    def value(self, u: float, v: float) -> float:
        c = self.coefficients
        return c[0] + c[1] * u + c[2] * v

    def learn(self, u: float, v: float, time: float) -> None:
        """One observation; ``time`` is positive. :meth:`fit` makes it count."""
        scale = time
        if self.known and (expected := self.value(u, v)) > TINY:
            scale = expected
            time = expected * (1 + min(CLIP, max(-CLIP, time / expected - 1)))
        self.count += 1
        w = 1 / (scale * scale)
        keep = 1 - 1 / min(MEMORY, 4 + self.count / 4)
        s, b, m = self._s, self._b, self._means
        wu, wv, wt = w * u, w * v, w * time
        s[0] = keep * s[0] + w
        s[1] = keep * s[1] + wu
        s[2] = keep * s[2] + wv
        s[3] = keep * s[3] + wu * u
        s[4] = keep * s[4] + wu * v
        s[5] = keep * s[5] + wv * v
        b[0] = keep * b[0] + wt
        b[1] = keep * b[1] + wt * u
        b[2] = keep * b[2] + wt * v
        share = max(1 / MEMORY, 1 / self.count)
        m[0] += share * (1.0 - m[0])
        m[1] += share * (u - m[1])
        m[2] += share * (v - m[2])
        m[3] += share * (time - m[3])

    def fit(self) -> None:
        """Bring the coefficients up to date."""
        typical = self._means[3]
        if not self.count:
            return
        units = [typical / x if x > NEGLIGIBLE * NEGLIGIBLE else 0.0 for x in self._means[:3]]
        active = [i for i in range(3) if units[i] > 0]
        while active:
            solved = self._solve(active, units)
            worst = min(range(len(active)), key=solved.__getitem__)
            if solved[worst] >= 0:
                found = list(self.seed)
                for i in range(3):
                    if units[i] > 0:
                        found[i] = 0.0
                for i, z in zip(active, solved, strict=True):
                    found[i] = min(MOST, z * units[i])
                if any(found):
                    self._replace(found)
                return
            del active[worst]

    def _replace(self, found: Sequence[float]) -> None:
        u, v = self._means[1], self._means[2]
        keep = 1.0
        if self.count > SETTLED:
            keep = self.value(u, v) / (found[0] + found[1] * u + found[2] * v)
        self.coefficients = (found[0] * keep, found[1] * keep, found[2] * keep)

    def _solve(self, active: Sequence[int], units: Sequence[float]) -> list[float]:
        """The active coefficients in units in which each could explain a typical time alone."""
        index = ((0, 1, 2), (1, 3, 4), (2, 4, 5))
        rows: list[list[float]] = []
        for i in active:
            row = [self._s[index[i][j]] * units[i] * units[j] for j in active]
            aim = self._b[i] * units[i]
            centre = self.seed[i] / units[i]
            pull = RIDGE
            if centre > NEGLIGIBLE:
                pull = min(MEMORY, max(RIDGE, 1 / (SEED_SPREAD * centre) ** 2))
            row[len(rows)] += pull
            rows.append([*row, aim + pull * centre])
        return _eliminate(rows)


def _eliminate(rows: list[list[float]]) -> list[float]:
    """Solve a symmetric positive definite system; each row ends with its right side."""
    size = len(rows)
    for i in range(size):
        # The ridge bounds every pivot from below; only rounding can take it there.
        pivot = rows[i][i] = max(RIDGE, rows[i][i])
        for k in range(i + 1, size):
            factor = rows[k][i] / pivot
            for j in range(i, size + 1):
                rows[k][j] -= factor * rows[i][j]
    solved = [0.0] * size
    for i in reversed(range(size)):
        rest = rows[i][size] - sum(rows[i][j] * solved[j] for j in range(i + 1, size))
        solved[i] = rest / rows[i][i]
    return solved
