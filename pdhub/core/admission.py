"""Bounded admission to one pool, without clock or I/O.

A request comes with a ticket. It is admitted while capacity is free, else it waits, else it is refused with a reason.
Waiting tickets are served by priority; within a priority the tenants take turns, and of one tenant's tickets the one
with the earliest deadline comes first. Nobody waits past a deadline.

Every change returns what the host has to act on, so that no ticket is lost between two calls. Times are seconds of
one monotonic clock, passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pdhub.core.bands import Bands, Ticket

__all__ = ["AdmissionQueue", "DroppedReason", "Offer", "Outcome", "Refusal", "Ticket"]

SMOOTHING: Final = 0.2
"""Weight of the newest service time in the moving average."""


class DroppedReason(StrEnum):
    """Values of ``x-llm-d-request-dropped-reason``."""

    SATURATED = "rejected-saturated"
    NO_ENDPOINTS = "rejected-no-endpoints"
    TTL_EXPIRED = "rejected-ttl-expired"
    CONTEXT_CANCELLED = "rejected-context-cancelled"
    SHUTTING_DOWN = "rejected-shutting-down"
    INTERNAL = "rejected-internal"
    EVICTED = "evicted"
    EVICTED_QUEUE_PRESSURE = "evicted-queue-pressure"
    EVICTED_PRIORITY = "evicted-priority"

    @property
    def contended(self) -> bool:
        """Capacity exists but is taken (429); otherwise nobody is there (503)."""
        return self not in (DroppedReason.NO_ENDPOINTS, DroppedReason.SHUTTING_DOWN, DroppedReason.INTERNAL)


class Outcome(StrEnum):
    ADMITTED = "admitted"
    QUEUED = "queued"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A ticket that may not enter. ``retry_after_s``: predicted wait; None = unknown."""

    ticket: Ticket
    reason: DroppedReason
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """The answer to one ticket. ``refusals`` are this one's, or of the one that had to make room for it."""

    outcome: Outcome
    refusals: tuple[Refusal, ...] = ()


@dataclass(slots=True)
class AdmissionQueue:
    """One pool's door.

    Args:
        limit: tickets that may wait; 0 = nobody waits.
        capacity: requests that may run at once; 0 = nobody is there. Changed by :meth:`resize`.
    """

    limit: int
    capacity: int
    _running: dict[str, float] = field(default_factory=dict)
    _waiting: Bands = field(default_factory=Bands)
    _service_s: float | None = None
    _closed: bool = False

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def offer(self, ticket: Ticket, now: float) -> Offer:
        """Try to enter. A full queue makes room for a ticket of higher priority by refusing its last one.

        Raises:
            ValueError: this id is running or waiting already.
        """
        if ticket.id in self._running or ticket.id in self._waiting:
            raise ValueError(f"ticket {ticket.id} was offered before")
        if self._closed:
            return self._refused(ticket, DroppedReason.SHUTTING_DOWN)
        if self.capacity <= 0:
            return self._refused(ticket, DroppedReason.NO_ENDPOINTS)
        if ticket.deadline <= now:
            return self._refused(ticket, DroppedReason.TTL_EXPIRED)
        if len(self._running) < self.capacity:  # then nobody in time is waiting: see _admit
            self._running[ticket.id] = now
            return Offer(Outcome.ADMITTED)
        if len(self._waiting) < self.limit:
            self._waiting.add(ticket)
            return Offer(Outcome.QUEUED)
        last = self._waiting.last()
        if last is None or last.priority >= ticket.priority:
            return self._refused(ticket, DroppedReason.SATURATED)
        self._waiting.remove(last.id)
        self._waiting.add(ticket)
        return Offer(Outcome.QUEUED, (Refusal(last, DroppedReason.EVICTED_PRIORITY, self.predicted_wait()),))

    def release(self, ticket_id: str, now: float) -> list[Ticket]:
        """A running request ended; the tickets admitted in its place. Raises KeyError if it was not running."""
        took = max(0.0, now - self._running.pop(ticket_id))
        old = self._service_s
        self._service_s = took if old is None else old + SMOOTHING * (took - old)
        return self._admit(now)

    def cancel(self, ticket_id: str, now: float) -> list[Ticket]:
        """The client left, in whatever state; the tickets admitted in its place. Unknown ids are ignored.

        How long a cancelled request ran says nothing about service times.
        """
        self._waiting.remove(ticket_id)
        if self._running.pop(ticket_id, None) is None:
            return []
        return self._admit(now)

    def resize(self, capacity: int, now: float) -> list[Ticket]:
        """Nodes came or went; the tickets admitted by that. Running requests go on even if it shrank."""
        self.capacity = capacity
        return self._admit(now)

    def expire(self, now: float) -> list[Refusal]:
        """Tickets whose deadline has passed. Call at :meth:`next_deadline` or a little later."""
        late = [ticket for ticket in self._waiting if ticket.deadline <= now]
        for ticket in late:
            self._waiting.remove(ticket.id)
        wait = self.predicted_wait()
        return [Refusal(ticket, DroppedReason.TTL_EXPIRED, wait) for ticket in late]

    def close(self) -> list[Refusal]:
        """No more tickets; those that waited are refused. Running requests end by :meth:`release`."""
        self._closed = True
        left, self._waiting = list(self._waiting), Bands()
        return [Refusal(ticket, DroppedReason.SHUTTING_DOWN) for ticket in left]

    def next_deadline(self) -> float | None:
        """The earliest deadline among the waiting."""
        return min((ticket.deadline for ticket in self._waiting), default=None)

    def predicted_wait(self) -> float | None:
        """Seconds until a ticket that came now, behind all others, would be admitted; None = nothing ended yet."""
        if self._service_s is None or self.capacity <= 0:
            return None
        free = max(0, self.capacity - len(self._running))
        ahead = max(0, len(self._waiting) + 1 - free)
        return ahead * self._service_s / self.capacity

    def _admit(self, now: float) -> list[Ticket]:
        """Fill the free places. Called whenever one became free, so that a place is never free while somebody in
        time waits."""
        admitted = []
        while len(self._running) < self.capacity and (ticket := self._waiting.take(now)):
            self._running[ticket.id] = now
            admitted.append(ticket)
        return admitted

    def _refused(self, ticket: Ticket, reason: DroppedReason) -> Offer:
        wait = self.predicted_wait() if reason.contended else None
        return Offer(Outcome.REFUSED, (Refusal(ticket, reason, wait),))
