"""The doors of all pools: the bounded wait of :class:`~pdhub.core.admission.AdmissionQueue`, on the event loop.
:mod:`pdhub.router.lines` has the same for prefill instances."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from pdhub.api.errors import AdmissionRejected
from pdhub.core.admission import AdmissionQueue, DroppedReason, Outcome, Refusal, Ticket
from pdhub.core.doors import AT_ONCE_S

RETRY_AFTER_S = 1.0
"""Told to clients while nothing has ended yet that a wait could be predicted from."""

KNOCK_S = 0.05
"""Between two tries of nodes that were busy though this router's count says otherwise: another router may have freed
one, and says nothing. Half of it is drawn by chance, so that routers do not knock together."""

_MESSAGES = {
    DroppedReason.SATURATED: "too many requests are waiting",
    DroppedReason.TTL_EXPIRED: "no place became free in time",
    DroppedReason.NO_ENDPOINTS: "no node is ready",
    DroppedReason.SHUTTING_DOWN: "the router is shutting down",
}
_CODES = {DroppedReason.TTL_EXPIRED: "queue_timeout", DroppedReason.NO_ENDPOINTS: "no_endpoints"}


def rejection(reason: DroppedReason, retry_after_s: float | None = None, *, shed: bool = False) -> AdmissionRejected:
    """The error for a refused ticket. ``shed``: it may be refused in favour of others, and was."""
    code = _CODES.get(reason, "queue_full" if reason.contended else None)
    return AdmissionRejected(
        "refused in favour of more important requests" if shed else _MESSAGES.get(reason, "the request was refused"),
        contended=reason.contended,
        retry_after_s=RETRY_AFTER_S if retry_after_s is None else retry_after_s,
        reason=reason.value,
        code="shed" if shed else code,
    )


class Gate:
    """Args:
    queues: by pool. clock: monotonic seconds.
    """

    def __init__(self, queues: Mapping[str, AdmissionQueue], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues = queues
        self._waiters: dict[tuple[str, str], asyncio.Future[bool]] = {}
        self._knocks: dict[str, asyncio.TimerHandle] = {}

    def waiting(self) -> Mapping[str, int]:
        """Requests in each pool's queue."""
        return {name: queue.waiting for name, queue in self._queues.items()}

    def ahead(self, ticket: Ticket) -> Mapping[str, int]:
        """Of those, how many would enter before this one."""
        return {name: queue.ahead(ticket) for name, queue in self._queues.items()}

    def opens(self, pool: str, ticket: Ticket) -> bool:
        """The pool would let it in or let it wait, or it waits there."""
        return (pool, ticket.id) in self._waiters or self._queues[pool].opens(ticket, self._clock())

    def predicted_wait(self, pool: str, ticket: Ticket | None = None) -> float | None:
        """Seconds until it would enter, from how fast places became free; None = unknown.

        Args:
            ticket: default: one that comes behind all others.
        """
        queue = self._queues[pool]
        return queue.predicted_wait(self._clock(), None if ticket is None else queue.ahead(ticket))

    def resize(self, pool: str, capacity: int) -> None:
        """How many requests the pool's nodes can take."""
        queue = self._queues[pool]
        if capacity != queue.capacity:
            self._admit(pool, queue.resize(capacity, self._clock()))

    def reconfigure(self, limit: int) -> None:
        """Another length of the queues, from the next request on; nobody who waits is sent away for it."""
        for queue in self._queues.values():
            queue.limit = limit

    def offer(self, pool: str, ticket: Ticket) -> bool:
        """Ask for a place: True = it is there, False = :meth:`wait` for it. Pair with :meth:`leave` in either case.

        Raises:
            AdmissionRejected: 429 when the queue is full or the deadline passed, 503 when nobody is there.
        """
        now = self._clock()
        if ticket.deadline < now + AT_ONCE_S:
            ticket = replace(ticket, deadline=now + AT_ONCE_S)
        offer = self._queues[pool].offer(ticket, now)
        for refusal in offer.refusals:
            if refusal.ticket.id != ticket.id:
                self._refuse(pool, refusal)
        if offer.outcome is Outcome.REFUSED:
            mine = offer.refusals[0]
            raise rejection(mine.reason, mine.retry_after_s)
        if offer.outcome is Outcome.QUEUED:
            self._waits(pool, ticket)
        return offer.outcome is Outcome.ADMITTED

    async def wait(self, pool: str, ticket: Ticket, until: float) -> bool:
        """True when it has its place; False if it still waits at ``until`` (clock of the gate), or is to look earlier.

        Raises:
            AdmissionRejected: its deadline passed, it was shed, or the router shuts down.
        """
        future = self._waiters[pool, ticket.id]
        last = ticket.deadline <= until
        limit = min(ticket.deadline, until) - self._clock()
        if not future.done():
            await asyncio.wait([future], timeout=max(0.0, limit))
        future = self._waiters[pool, ticket.id]
        if _woken(future):
            self._waits(pool, ticket)
            return False
        if future.done():
            del self._waiters[pool, ticket.id]
            return future.result()
        if not last:
            return False
        wait = self.predicted_wait(pool)
        self.leave(pool, ticket.id, served=False)
        raise rejection(DroppedReason.TTL_EXPIRED, wait)

    async def enter(self, pool: str, ticket: Ticket) -> None:
        """:meth:`offer`, and :meth:`wait` to the end."""
        try:
            if not self.offer(pool, ticket):
                await self.wait(pool, ticket, ticket.deadline)
        except asyncio.CancelledError:
            self.leave(pool, ticket.id, served=False)
            raise

    def busy(self, pool: str, ticket: Ticket) -> None:
        """It had a place, but every node was busy: back to :meth:`wait`. Raises AdmissionRejected when closed."""
        queue = self._queues[pool]
        offer = queue.busy(ticket.id, self._clock())
        if offer.outcome is Outcome.REFUSED:
            raise rejection(offer.refusals[0].reason)
        self._waits(pool, ticket)
        if pool not in self._knocks:
            self._knock_later(pool)

    def entered(self, pool: str, ticket_id: str) -> None:
        """A node took it."""
        queue = self._queues[pool]
        if queue.held_back:
            self._admit(pool, queue.entered(ticket_id, self._clock()))

    def leave(self, pool: str, ticket_id: str, *, served: bool) -> None:
        """It no longer has or wants a place; idempotent unless ``served``.

        Args:
            served: it ran to its end, so its time can be learned from.
        """
        future = self._waiters.pop((pool, ticket_id), None)
        if future is not None and future.done() and not future.cancelled():
            future.exception()  # it was refused, and nobody will ask why
        queue, now = self._queues[pool], self._clock()
        self._admit(pool, queue.release(ticket_id, now) if served else queue.cancel(ticket_id, now))

    def close(self) -> None:
        """Refuse whoever waits, and whoever comes."""
        for knock in self._knocks.values():
            knock.cancel()
        self._knocks.clear()
        for pool, queue in self._queues.items():
            for refusal in queue.close():
                self._refuse(pool, refusal)

    def _waits(self, pool: str, ticket: Ticket) -> None:
        self._waiters[pool, ticket.id] = asyncio.get_running_loop().create_future()

    def _knock_later(self, pool: str) -> None:
        delay = KNOCK_S * (0.75 + random.random() / 2)
        self._knocks[pool] = asyncio.get_running_loop().call_later(delay, self._knock, pool)

    def _knock(self, pool: str) -> None:
        queue = self._queues[pool]
        del self._knocks[pool]
        self._admit(pool, queue.probe(self._clock()))
        if queue.held_back:
            self._knock_later(pool)

    def _wake(self, pool: str, ticket_id: str) -> None:
        """It still waits, but should look at once whether that is right."""
        future = self._waiters.get((pool, ticket_id))
        if future is not None and not future.done():
            future.set_result(False)

    def _admit(self, pool: str, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            future = self._open(pool, ticket.id)
            if future is not None:
                future.set_result(True)

    def _open(self, pool: str, ticket_id: str) -> asyncio.Future[bool] | None:
        """Where to tell it how its wait ended; None if nobody listens any more."""
        future = self._waiters.get((pool, ticket_id))
        if future is not None and _woken(future):  # and has not looked yet
            future = self._waiters[pool, ticket_id] = asyncio.get_running_loop().create_future()
        return None if future is None or future.done() else future

    def _refuse(self, pool: str, refusal: Refusal) -> None:
        future = self._open(pool, refusal.ticket.id)
        if future is not None:
            future.set_exception(rejection(refusal.reason, refusal.retry_after_s, shed=refusal.shed))


def _woken(future: asyncio.Future[bool]) -> bool:
    """It was told to look, and nothing else."""
    return future.done() and not future.cancelled() and future.exception() is None and not future.result()
