"""The line in front of a prefill instance, which computes prompts in the order in which they come.

So that this order is the router's, the next prompt is sent only when little is left of those that were sent before: so
little that it arrives in time, and the instance never waits for it. The others wait here, by the rules of
:mod:`pdhub.core.admission`. Sans-IO, for the router and the lab alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pdhub.core.admission import AdmissionQueue, Ticket
from pdhub.core.pace import Pace

UNTRIED_TOKENS: Final = 2048
"""Sent ahead to an instance that has not answered yet."""

LEAST_S: Final = 0.001
"""Between two looks whether the next one may be sent."""

NO_LIMIT: Final = 1 << 40
"""Whoever waits here has a place in a pool, so there are no more of them than places."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The next prompt is sent to an instance when less than this is left of those that it was sent.

    Args:
        seconds: of its work, at the pace that was measured. tokens: not answered, instead of that if not None.
    """

    seconds: float = 0.05
    tokens: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class Backlog:
    """What a prompt would have in front of it. Of two, the lesser is sent sooner.

    Args:
        wait_ms: until it is sent.
        tokens: prompt tokens that the instance was sent before it and has not answered by then.
    """

    wait_ms: float = 0.0
    tokens: int = 0


class TurnQueue(AdmissionQueue):
    """One instance's line. A ticket weighs the prompt tokens that have to be computed, and runs from its turn until the
    instance has answered (:meth:`release`), or nobody waits for that any more (:meth:`cancel`)."""

    def __init__(self, ahead: Ahead) -> None:
        super().__init__(limit=NO_LIMIT, capacity=ahead.tokens or UNTRIED_TOKENS)
        self._ahead_of = ahead
        self._pace = Pace()

    def set_ahead(self, ahead: Ahead, now: float) -> list[Ticket]:
        """Another bound; the tickets whose turn comes by that."""
        self._ahead_of = ahead
        return self.resize(self._bound(now), now)

    def release(self, ticket_id: str, now: float) -> list[Ticket]:
        """The instance has answered; the tickets whose turn it is."""
        _, ticket = self._running[ticket_id]
        self._pace.answered(ticket.weight, now)
        self.capacity = self._bound(now)
        return super().release(ticket_id, now)

    def before(self, ticket: Ticket) -> Iterator[Ticket]:
        """Those that wait and have their turn before this one, in no order."""
        return self._waiting.before(ticket)

    def ahead(self, ticket: Ticket) -> int:
        """Their weight."""
        return sum(other.weight for other in self._waiting.before(ticket)) if self._waiting else 0

    def predicted_wait(self, now: float, ahead: int | None = None) -> float | None:
        """Seconds until the turn of a ticket with such a weight before it; None = unknown.

        Args:
            ahead: default: all that wait.
        """
        pace = self._pace.per_s(now)
        if pace is None:
            return None
        before = sum(ticket.weight for ticket in self._waiting) if ahead is None else ahead
        return max(0.0, self._left(now, pace) + before - self.capacity) / pace

    def next_s(self, now: float) -> float | None:
        """When to :meth:`probe`: the next one may be sent then, though nothing was answered. None = not before that."""
        pace = self._pace.per_s(now)
        if pace is None or self._ahead_of.tokens is not None or not self._waiting:
            return None
        missing = self._left(now, pace) - self.capacity
        _, first = next(iter(self._running.values()))
        if self._load - first.weight >= self.capacity:
            return None
        return now + max(LEAST_S, missing / pace)

    def probe(self, now: float) -> list[Ticket]:
        """The tickets whose turn came with time."""
        return self._admit(now)

    def backlog(self, ticket: Ticket, sent: int, now: float) -> Backlog:
        """What this ticket would have in front of it.

        Args:
            sent: prompt tokens that the instance was sent and has not answered.
        """
        if ticket.id in self._running:
            return Backlog(0.0, sent)
        ahead = self.ahead(ticket)
        wait_s = self.predicted_wait(now, ahead)
        if wait_s is None:
            return Backlog(0.0, sent + ahead)
        return Backlog(wait_s * 1000, min(sent, self.capacity) if wait_s else sent)

    def spare(self, now: float) -> bool:
        """It could be sent more, and nobody is in its line."""
        return self._load < self.capacity and self._waiting.next(now) is None

    def first(self, now: float) -> Ticket | None:
        """Whose turn comes next."""
        return self._waiting.next(now)

    def _left(self, now: float, pace: float) -> float:
        """Tokens of what it was sent that it still has to compute."""
        if not self._running or self._ahead_of.tokens is not None:
            return float(self._load)
        # It computes them in this order, so that what it has done since it answered last is of the first.
        _, first = next(iter(self._running.values()))
        return self._load - min(first.weight, self._pace.since_s(now) * pace)

    def _has_room(self, ticket: Ticket, now: float) -> bool:
        pace = self._pace.per_s(now)
        left = float(self._load) if pace is None else self._left(now, pace)
        return not self._load or left < self.capacity

    def _bound(self, now: float) -> int:
        ahead, pace = self._ahead_of, self._pace.per_s(now)
        if ahead.tokens is not None:
            return ahead.tokens
        return UNTRIED_TOKENS if pace is None else max(1, int(pace * ahead.seconds))

    def _start(self, ticket: Ticket, now: float) -> None:
        self._pace.sent(ticket.weight, now)
        super()._start(ticket, now)

    def cancel(self, ticket_id: str, now: float) -> list[Ticket]:
        if ticket_id in self._running:
            self._pace.dropped(self._running[ticket_id][1].weight, now)
        return super().cancel(ticket_id, now)


def restless(lines: Mapping[str, TurnQueue], idle: str, now: float) -> tuple[str, Ticket] | None:
    """Who should look for another instance because one has nothing to do, and where it waits: whoever is next where
    most wait. None if nobody is to move."""
    if not lines[idle].spare(now):
        return None
    others = [(line.waiting, name) for name, line in lines.items() if name != idle and line.waiting]
    if not others:
        return None
    name = max(others)[1]
    ticket = lines[name].first(now)
    return None if ticket is None else (name, ticket)
