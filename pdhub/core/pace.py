"""How fast something that computes works through what it is sent, measured while it has something to do."""

from __future__ import annotations

from typing import Final

MEMORY: Final = 16
"""Answers; older ones fade."""


class Pace:
    """Tokens a second, of all that is under way together: what is computed side by side counts once in time.

    Times are seconds of one monotonic clock, passed in.
    """

    __slots__ = ("_busy_s", "_done", "_since", "under_way")

    def __init__(self) -> None:
        self.under_way = 0
        self._done = self._busy_s = 0.0
        self._since = 0.0

    def sent(self, tokens: int, now: float) -> None:
        """So many tokens more are to be computed."""
        if not self.under_way:
            self._since = now
        self.under_way += tokens

    def answered(self, tokens: int, now: float) -> None:
        """That many, which were sent, are computed."""
        self._busy_s += max(0.0, now - self._since)
        self._done += tokens
        keep = 1 - 1 / MEMORY
        self._busy_s *= keep
        self._done *= keep
        self.dropped(tokens, now)

    def dropped(self, tokens: int, now: float) -> None:
        """Nobody waits for them any more; how long that took says nothing, so that the time so far is not counted."""
        self.under_way -= tokens
        self._since = now

    def since_s(self, now: float) -> float:
        """How long it has worked since it answered last, or since it was idle."""
        return max(0.0, now - self._since) if self.under_way else 0.0

    def per_s(self, now: float) -> float | None:
        """Tokens a second; None = nothing was answered yet. If the next answer is overdue it is slower by now: all that
        is under way would have to be answered this very moment."""
        if not self._done or not self._busy_s:
            return None
        pace = self._done / self._busy_s
        if self.under_way:
            late = (self._done + self.under_way) / (self._busy_s + self.since_s(now))
            pace = min(pace, late)
        return pace
