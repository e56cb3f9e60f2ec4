"""The order in which waiting tickets are served: priority, then tenants in turn, then earliest deadline."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request at the door.

    Args:
        id: unique among the running and the waiting.
        deadline: when it must have been admitted, seconds of the host's monotonic clock.
        priority: higher is more important.
        tenant: who asks.
        arrived: same clock as ``deadline``; of two equal deadlines the earlier arrival is served first.
    """

    id: str
    deadline: float
    priority: int = 0
    tenant: str = "default-flow"
    arrived: float = 0.0


@dataclass(slots=True)
class Bands:
    """Waiting tickets by priority (a band each), by tenant, by deadline.

    A tenant that was served goes behind the band's other tenants, and a new one joins at the end, so that one with
    many requests delays the others by one turn at most.
    """

    _tickets: dict[str, Ticket] = field(default_factory=dict)
    _bands: dict[int, dict[str, list[Ticket]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, ticket_id: object) -> bool:
        return ticket_id in self._tickets

    def __iter__(self) -> Iterator[Ticket]:
        return iter(tuple(self._tickets.values()))

    def add(self, ticket: Ticket) -> None:
        """Its id must not be here yet."""
        self._tickets[ticket.id] = ticket
        tenants = self._bands.setdefault(ticket.priority, {})
        bisect.insort(tenants.setdefault(ticket.tenant, []), ticket, key=_urgency)

    def remove(self, ticket_id: str) -> Ticket | None:
        """Take one out, wherever it stands; None if it is not here."""
        ticket = self._tickets.pop(ticket_id, None)
        if ticket is not None:
            tenants = self._bands[ticket.priority]
            tenants[ticket.tenant].remove(ticket)
            if not tenants[ticket.tenant]:
                del tenants[ticket.tenant]
            if not tenants:
                del self._bands[ticket.priority]
        return ticket

    def take(self, now: float) -> Ticket | None:
        """The next one that is still in time; late ones stay for whoever refuses them."""
        for priority in sorted(self._bands, reverse=True):
            tenants = self._bands[priority]
            for tenant, queue in tenants.items():
                ticket = next((ticket for ticket in queue if ticket.deadline > now), None)
                if ticket is not None:
                    self.remove(ticket.id)
                    if tenant in tenants:
                        tenants[tenant] = tenants.pop(tenant)
                    return ticket
        return None

    def last(self) -> Ticket | None:
        """The one to give up for a more important one: lowest priority, then latest deadline."""
        if not self._bands:
            return None
        tenants = self._bands[min(self._bands)]
        return max((queue[-1] for queue in tenants.values()), key=_urgency)


def _urgency(ticket: Ticket) -> tuple[float, float, str]:
    return ticket.deadline, ticket.arrived, ticket.id
