"""When a dead child is started again: exponential back-off with jitter, and when to give up. No clock of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartRule:
    """Seconds, unless the name says otherwise.

    Args:
        first_s: delay of the first restart; each further one doubles it.
        cap_s: the longest delay.
        jitter: share of the delay that is drawn at random on top, so that a fleet does not restart in step.
        stable_s: a child that was ready for so long starts over with ``first_s``.
        give_up_after: failures in a row after which it is left alone.
    """

    first_s: float = 0.5
    cap_s: float = 30.0
    jitter: float = 0.25
    stable_s: float = 60.0
    give_up_after: int = 8


class Backoff:
    """The failures of one child.

    Args:
        rule: see :class:`RestartRule`.
        rng: source of jitter.
    """

    def __init__(self, rule: RestartRule, rng: random.Random) -> None:
        self._rule = rule
        self._rng = rng
        self.failures = 0

    def died(self, ready_for_s: float | None) -> float | None:
        """A child ended. ``ready_for_s``: how long it had served, None if it never did.

        Returns the seconds to wait before it is started again; None means give up.
        """
        if ready_for_s is not None and ready_for_s >= self._rule.stable_s:
            self.failures = 0
        self.failures += 1
        if self.failures > self._rule.give_up_after:
            return None
        exponent = min(self.failures - 1, 32)  # beyond the cap anyway; keeps the number small
        delay = min(self._rule.cap_s, self._rule.first_s * 2.0**exponent)
        return delay * (1 + self._rule.jitter * self._rng.random())
