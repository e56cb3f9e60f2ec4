"""Virtual time: events in order, as fast as they can be handled."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Loop:
    """``now`` is seconds since the run began. Events of the same moment happen in the order they were asked for."""

    __slots__ = ("_events", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0

    def at(self, when_s: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Call once, at that time or now if it has passed."""
        self._number += 1
        heapq.heappush(self._events, (max(when_s, self.now), self._number, call, argument))

    def run(self, until_s: float | None = None) -> None:
        """Until nothing is left to happen, or until that time."""
        events, pop = self._events, heapq.heappop
        while events:
            if until_s is not None and events[0][0] > until_s:
                self.now = until_s
                return
            when, _, call, argument = pop(events)
            self.now = when
            call(argument)
