"""The order in which waiting tickets are served: bands, in a band the tenants in turn, of a tenant the most urgent."""

from __future__ import annotations

import bisect
import math
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
        arrived: same clock as ``deadline``; of two equally urgent tickets the earlier arrival is served first.
        rank: as :meth:`pdhub.api.policy.AdmissionOrder.rank` gives it; empty = by priority, then deadline.
        sheddable: may be refused for another; None = if its priority is negative.
        weight: how much of the capacity it takes, in the units of that.
    """

    id: str
    deadline: float
    priority: int = 0
    tenant: str = "default-flow"
    arrived: float = 0.0
    rank: tuple[float, ...] = ()
    sheddable: bool | None = None
    weight: int = 1
    band: float = field(init=False, repr=False, compare=False)
    urgency: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rank = self.rank or (float(-self.priority), self.deadline)
        band, *rest = (math.inf if math.isnan(number) else float(number) for number in rank)
        object.__setattr__(self, "band", band)
        object.__setattr__(self, "urgency", (*rest, self.arrived))
        if self.sheddable is None:
            object.__setattr__(self, "sheddable", self.priority < 0)


@dataclass(slots=True)
class Bands:
    """Waiting tickets by band, by tenant, by urgency.

    A tenant that was served goes behind the band's other tenants, and a new one joins at the end, so that one with
    many requests delays the others by one turn at most.
    """

    _tickets: dict[str, Ticket] = field(default_factory=dict)
    _bands: dict[float, dict[str, list[Ticket]]] = field(default_factory=dict)
    _order: list[float] = field(default_factory=list)
    _tenants: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, ticket_id: object) -> bool:
        return ticket_id in self._tickets

    def __iter__(self) -> Iterator[Ticket]:
        return iter(tuple(self._tickets.values()))

    def of_tenant(self, tenant: str) -> int:
        """How many of this tenant wait."""
        return self._tenants.get(tenant, 0)

    def add(self, ticket: Ticket) -> None:
        """Its id must not be here yet."""
        self._tickets[ticket.id] = ticket
        self._tenants[ticket.tenant] = self.of_tenant(ticket.tenant) + 1
        if ticket.band not in self._bands:
            self._bands[ticket.band] = {}
            bisect.insort(self._order, ticket.band)
        bisect.insort(self._bands[ticket.band].setdefault(ticket.tenant, []), ticket, key=_urgency)

    def remove(self, ticket_id: str) -> Ticket | None:
        """Take one out, wherever it stands; None if it is not here."""
        ticket = self._tickets.pop(ticket_id, None)
        if ticket is not None:
            self._tenants[ticket.tenant] -= 1
            if not self._tenants[ticket.tenant]:
                del self._tenants[ticket.tenant]
            tenants = self._bands[ticket.band]
            tenants[ticket.tenant].remove(ticket)
            if not tenants[ticket.tenant]:
                del tenants[ticket.tenant]
            if not tenants:
                del self._bands[ticket.band]
                del self._order[bisect.bisect_left(self._order, ticket.band)]
        return ticket

    def next(self, now: float) -> Ticket | None:
        """Whose turn it is: the next one that is still in time; late ones stay for whoever refuses them."""
        for band in self._order:
            for queue in self._bands[band].values():
                ticket = next((ticket for ticket in queue if ticket.deadline > now), None)
                if ticket is not None:
                    return ticket
        return None

    def take(self, now: float) -> Ticket | None:
        """:meth:`next`, which no longer waits; its tenant has had its turn."""
        ticket = self.next(now)
        if ticket is not None:
            self.remove(ticket.id)
            tenants = self._bands.get(ticket.band, {})
            if ticket.tenant in tenants:
                tenants[ticket.tenant] = tenants.pop(ticket.tenant)
        return ticket

    def ahead(self, ticket: Ticket) -> int:
        """How many of those that wait enter before this one, whether it waits already or would come now."""
        return sum(count for _, count in self._before(ticket))

    def before(self, ticket: Ticket) -> Iterator[Ticket]:
        """Those that :meth:`ahead` counts, in no order."""
        for queue, count in self._before(ticket):
            yield from queue[:count]

    def _before(self, ticket: Ticket) -> Iterator[tuple[list[Ticket], int]]:
        """Of each queue, how many enter before it."""
        better = bisect.bisect_left(self._order, ticket.band)
        for band in self._order[:better]:
            for queue in self._bands[band].values():
                yield queue, len(queue)
        tenants = self._bands.get(ticket.band, {})
        place = bisect.bisect_left(tenants.get(ticket.tenant, ()), _urgency(ticket), key=_urgency)
        mine = ticket.tenant in tenants
        for tenant, queue in tenants.items():
            if tenant == ticket.tenant:
                yield queue, place
                mine = False  # tenants behind in the turn are passed once less often
            else:
                yield queue, min(len(queue), place + (1 if mine or ticket.tenant not in tenants else 0))

    def shed(self, band: float | None, tenant: str | None = None) -> Ticket | None:
        """The one to refuse in favour of another: sheddable, of the last band, of the tenant that has most waiting
        there, its least urgent. None if there is none.

        Args:
            band: only one of a later band than this; None = of any.
            tenant: only one of this tenant; None = of any.
        """
        for last in reversed(self._order):
            if band is not None and last <= band:
                return None
            found = [
                (len(queue), _urgency(ticket), ticket)
                for name, queue in self._bands[last].items()
                if tenant in (None, name)
                and (ticket := next((t for t in reversed(queue) if t.sheddable), None)) is not None
            ]
            if found:
                return max(found, key=lambda entry: entry[:2])[2]
        return None


def _urgency(ticket: Ticket) -> tuple[tuple[float, ...], str]:
    return ticket.urgency, ticket.id
