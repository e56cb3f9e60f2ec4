"""Bounded admission to one pool, without clock or I/O.

A request comes with a ticket. It is admitted while capacity is free, else it waits, else it is refused with a reason.
Waiting tickets are served by band (priority, unless an order says otherwise); within a band the tenants take turns,
and of one tenant's tickets the most urgent comes first. Nobody waits past a deadline. A full queue makes room for
another only by refusing a ticket that is sheddable, the last one first.

Capacity is what the nodes told; other routers use it too. A request that was admitted but found every node busy comes
back (:meth:`AdmissionQueue.busy`): then one ticket at a time may try, until one gets in.

A ticket takes its weight of the capacity, as a rule 1. One that is heavier than all of it enters when nothing else
runs: whoever is first keeps its turn, and nobody behind it enters in the meantime.

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

CROWD: Final = 4
"""While several tenants come, one may have so many times as many tickets waiting as there are free places in the
queue: it never fills up for the others."""

REMEMBERED_S: Final = 10.0
REMEMBERED: Final = 64
"""How long, and how many, tenants count as coming."""


class DroppedReason(StrEnum):
    """Values of ``x-llm-d-request-dropped-reason``, as llm-d means them: *rejected* reached no engine, *evicted* was
    running. pdhub never evicts what runs, so who is shed from a queue is rejected as well."""

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
    """A ticket that may not enter.

    Args:
        retry_after_s: predicted wait; None = unknown.
        shed: it had to make room for a more important one.
    """

    ticket: Ticket
    reason: DroppedReason
    retry_after_s: float | None = None
    shed: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """The answer to one ticket. ``refusals`` are this one's, or of the one that had to make room for it."""

    outcome: Outcome
    refusals: tuple[Refusal, ...] = ()


@dataclass(slots=True)
class AdmissionQueue:
    """One pool's door.

    Args:
        limit: tickets that may wait; 0 = nobody waits. May be changed; who waits already stays.
        capacity: weight of the requests that may run at once; 0 = nobody is there. Changed by :meth:`resize`.
    """

    limit: int
    capacity: int
    _running: dict[str, tuple[float, Ticket]] = field(default_factory=dict)
    _load: int = 0
    _waiting: Bands = field(default_factory=Bands)
    _ceiling: int | None = None
    _service_s: float | None = None
    _tenants: dict[str, float] = field(default_factory=dict)
    _closed: bool = False

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def load(self) -> int:
        """Weight of those that run."""
        return self._load

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def held_back(self) -> bool:
        """The nodes were busier than their capacity says; call :meth:`probe` after a moment."""
        return self._ceiling is not None

    def offer(self, ticket: Ticket, now: float) -> Offer:
        """Try to enter. A full queue makes room by refusing a sheddable ticket of a later band, or any sheddable
        one if the new ticket is not sheddable.

        Raises:
            ValueError: this id is running or waiting already.
        """
        if ticket.id in self._running or ticket.id in self._waiting:
            raise ValueError(f"ticket {ticket.id} was offered before")
        self._remember(ticket, now)
        reason, victim = self._door(ticket, now)
        if reason is not None:
            wait = self.predicted_wait(now) if reason.contended else None
            return Offer(Outcome.REFUSED, (Refusal(ticket, reason, wait),))
        if self._enters(ticket, now):
            self._start(ticket, now)
            return Offer(Outcome.ADMITTED)
        refusals: tuple[Refusal, ...] = ()
        if victim is not None:
            self._waiting.remove(victim.id)
            wait = self.predicted_wait(now)
            refusals = (Refusal(victim, DroppedReason.SATURATED, wait, shed=True),)
        self._waiting.add(ticket)
        return Offer(Outcome.QUEUED, refusals)

    def opens(self, ticket: Ticket, now: float) -> bool:
        """Whether :meth:`offer` would let it in or let it wait. Changes nothing."""
        return self._door(ticket, now)[0] is None

    def busy(self, ticket_id: str, now: float) -> Offer:
        """Admitted, but every node was busy: it waits again, at its place in the order, however full the queue is.
        From now on one ticket at a time may try. Raises KeyError if it was not running."""
        _, ticket = self._stop(ticket_id)
        self._ceiling = self._load
        if self._closed:
            return Offer(Outcome.REFUSED, (Refusal(ticket, DroppedReason.SHUTTING_DOWN),))
        self._waiting.add(ticket)
        return Offer(Outcome.QUEUED)

    def probe(self, now: float) -> list[Ticket]:
        """A moment after :meth:`busy`: one more may try."""
        return self._raise_ceiling(now)

    def entered(self, ticket_id: str, now: float) -> list[Ticket]:
        """A node took it: whoever is admitted because of that may try as well."""
        return self._raise_ceiling(now) if ticket_id in self._running else []

    def release(self, ticket_id: str, now: float) -> list[Ticket]:
        """A running request ended; the tickets admitted in its place. Raises KeyError if it was not running."""
        took = max(0.0, now - self._stop(ticket_id)[0])
        old = self._service_s
        self._service_s = took if old is None else old + SMOOTHING * (took - old)
        return self._admit(now)

    def cancel(self, ticket_id: str, now: float) -> list[Ticket]:
        """The client left, in whatever state; the tickets admitted in its place. Unknown ids are ignored.

        How long a cancelled request ran says nothing about service times.
        """
        waited = self._waiting.remove(ticket_id) is not None
        if ticket_id in self._running:
            self._stop(ticket_id)
        elif not waited:
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
        wait = self.predicted_wait(now)
        return [Refusal(ticket, DroppedReason.TTL_EXPIRED, wait) for ticket in late]

    def close(self) -> list[Refusal]:
        """No more tickets; those that waited are refused. Running requests end by :meth:`release`."""
        self._closed = True
        left, self._waiting = list(self._waiting), Bands()
        return [Refusal(ticket, DroppedReason.SHUTTING_DOWN) for ticket in left]

    def next_deadline(self) -> float | None:
        """The earliest deadline among the waiting."""
        return min((ticket.deadline for ticket in self._waiting), default=None)

    def ahead(self, ticket: Ticket) -> int:
        """How many of those that wait enter before this one, whether it waits already or would come now."""
        return self._waiting.ahead(ticket) if self._waiting else 0

    def predicted_wait(self, now: float, ahead: int | None = None) -> float | None:
        """Seconds until a ticket with ``ahead`` others before it would be admitted; None = unknown.

        Args:
            ahead: default: all that wait.
        """
        places = max(1, self._places())
        free = max(0, self._places() - len(self._running))
        before = max(0, (len(self._waiting) if ahead is None else ahead) + 1 - free)
        # Nothing ends any more when the nodes have stalled; then those that run show how long it takes at least.
        age = sum(now - since for since, _ in self._running.values()) / max(1, len(self._running))
        service = max(self._service_s or 0.0, age)
        if self.capacity <= 0 or (self._service_s is None and not service):
            return None
        return before * service / places

    def _door(self, ticket: Ticket, now: float) -> tuple[DroppedReason | None, Ticket | None]:
        """Why it may not enter, and who would have to make room for it."""
        if self._closed:
            return DroppedReason.SHUTTING_DOWN, None
        if self.capacity <= 0:
            return DroppedReason.NO_ENDPOINTS, None
        if ticket.deadline <= now:
            return DroppedReason.TTL_EXPIRED, None
        if self._enters(ticket, now):
            return None, None
        crowds = self._crowds(ticket, now)
        if len(self._waiting) < self.limit and not crowds:
            return None, None
        victim = self._waiting.shed(ticket.band if ticket.sheddable else None, ticket.tenant if crowds else None)
        return (None, victim) if victim is not None else (DroppedReason.SATURATED, None)

    def _crowds(self, ticket: Ticket, now: float) -> bool:
        """Whether its tenant has more than its share of the queue while others come too."""
        mine = self._waiting.of_tenant(ticket.tenant)
        if mine < CROWD * max(0, self.limit - len(self._waiting)):
            return False
        return mine > 0 and any(t != ticket.tenant and now - at < REMEMBERED_S for t, at in self._tenants.items())

    def _remember(self, ticket: Ticket, now: float) -> None:
        self._tenants.pop(ticket.tenant, None)
        self._tenants[ticket.tenant] = now
        if len(self._tenants) > REMEMBERED:
            del self._tenants[next(iter(self._tenants))]

    def _places(self) -> int:
        return self.capacity if self._ceiling is None else min(self.capacity, self._ceiling)

    def _raise_ceiling(self, now: float) -> list[Ticket]:
        if self._ceiling is not None:
            self._ceiling = max(self._ceiling, self._load) + 1
            if self._ceiling >= self.capacity:
                self._ceiling = None
        return self._admit(now)

    def _admit(self, now: float) -> list[Ticket]:
        """Fill the free places. Called whenever one became free, so that a place is never free while somebody in
        time waits."""
        admitted = []
        while (ticket := self._waiting.next(now)) is not None and self._has_room(ticket, now):
            self._waiting.take(now)
            self._start(ticket, now)
            admitted.append(ticket)
        return admitted

    def _enters(self, ticket: Ticket, now: float) -> bool:
        """There is room for it, and for nobody in time that waits: it is not to overtake one that is too heavy now."""
        return self._has_room(ticket, now) and (not self._waiting or self._waiting.next(now) is None)

    def _has_room(self, ticket: Ticket, now: float) -> bool:
        places = self._places()
        return self._load + ticket.weight <= places or (not self._load and places > 0)

    def _start(self, ticket: Ticket, now: float) -> None:
        self._running[ticket.id] = (now, ticket)
        self._load += ticket.weight

    def _stop(self, ticket_id: str) -> tuple[float, Ticket]:
        since, ticket = self._running.pop(ticket_id)
        self._load -= ticket.weight
        return since, ticket
