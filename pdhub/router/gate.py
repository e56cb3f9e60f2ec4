"""The doors of all pools: the bounded wait of :class:`~pdhub.core.admission.AdmissionQueue`, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from pdhub.api.errors import AdmissionRejected
from pdhub.core.admission import AdmissionQueue, DroppedReason, Outcome, Refusal, Ticket

AT_ONCE_S = 0.001
"""A target may be shorter than parsing took; with a free place there is nothing to wait for."""

RETRY_AFTER_S = 1.0
"""Told to clients while nothing has ended yet that a wait could be predicted from."""

_MESSAGES = {
    DroppedReason.SATURATED: "too many requests are waiting",
    DroppedReason.TTL_EXPIRED: "no place became free in time",
    DroppedReason.NO_ENDPOINTS: "no node is ready",
    DroppedReason.SHUTTING_DOWN: "the router is shutting down",
}
_CODES = {DroppedReason.TTL_EXPIRED: "queue_timeout", DroppedReason.NO_ENDPOINTS: "no_endpoints"}


def rejection(reason: DroppedReason, retry_after_s: float | None = None) -> AdmissionRejected:
    """The error for a refused ticket."""
    return AdmissionRejected(
        _MESSAGES.get(reason, "the request was refused"),
        contended=reason.contended,
        retry_after_s=RETRY_AFTER_S if retry_after_s is None else retry_after_s,
        reason=reason.value,
        code=_CODES.get(reason, "queue_full" if reason.contended else None),
    )


class Gate:
    """Args:
    pools: names. limit: requests that may wait a pool. clock: monotonic seconds.
    """

    def __init__(self, pools: Iterable[str], limit: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues = {name: AdmissionQueue(limit=limit, capacity=0) for name in pools}
        self._waiters: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._freed = {name: asyncio.Event() for name in self._queues}

    def waiting(self) -> Mapping[str, int]:
        """Requests in each pool's queue."""
        return {name: queue.waiting for name, queue in self._queues.items()}

    def resize(self, pool: str, capacity: int) -> None:
        """How many requests the pool's nodes can take."""
        queue = self._queues[pool]
        if capacity != queue.capacity:
            self._admit(pool, queue.resize(capacity, self._clock()))

    def reconfigure(self, limit: int) -> None:
        """Another length of the queues, from the next request on; nobody who waits is sent away for it."""
        for queue in self._queues.values():
            queue.limit = limit

    async def enter(self, pool: str, ticket: Ticket) -> None:
        """Wait for a place; pair with :meth:`leave`, whatever happens after it returned.

        Raises:
            AdmissionRejected: 429 when the queue is full or the deadline passed, 503 when nobody is there.
        """
        now = self._clock()
        ticket = Ticket(
            ticket.id, max(ticket.deadline, now + AT_ONCE_S), ticket.priority, ticket.tenant, ticket.arrived
        )
        queue = self._queues[pool]
        offer = queue.offer(ticket, now)
        for refusal in offer.refusals:
            if refusal.ticket.id != ticket.id:
                self._refuse(pool, refusal)
        if offer.outcome is Outcome.REFUSED:
            mine = offer.refusals[0]
            raise rejection(mine.reason, mine.retry_after_s)
        if offer.outcome is Outcome.ADMITTED:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[pool, ticket.id] = future
        try:
            async with asyncio.timeout(ticket.deadline - now):
                await future
        except TimeoutError:
            wait = queue.predicted_wait(self._clock())
            self._admit(pool, queue.cancel(ticket.id, self._clock()))
            raise rejection(DroppedReason.TTL_EXPIRED, wait) from None
        except asyncio.CancelledError:
            self._admit(pool, queue.cancel(ticket.id, self._clock()))
            raise
        finally:
            self._waiters.pop((pool, ticket.id), None)

    def leave(self, pool: str, ticket_id: str, *, served: bool) -> None:
        """The request no longer holds its place. ``served``: it ran to its end, so its time can be learned from."""
        queue, now = self._queues[pool], self._clock()
        self._admit(pool, queue.release(ticket_id, now) if served else queue.cancel(ticket_id, now))
        self.freed(pool)

    def freed(self, pool: str) -> None:
        """A node of the pool has room again, as far as this router knows."""
        self._freed[pool].set()

    async def wait_freed(self, pool: str, limit_s: float) -> None:
        """Until :meth:`freed`, at most ``limit_s``: other routers free room too, and say nothing."""
        event = self._freed[pool]
        event.clear()
        try:
            async with asyncio.timeout(limit_s):
                await event.wait()
        except TimeoutError:
            return

    def close(self) -> None:
        """Refuse whoever waits, and whoever comes."""
        for pool, queue in self._queues.items():
            for refusal in queue.close():
                self._refuse(pool, refusal)

    def _admit(self, pool: str, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            future = self._waiters.get((pool, ticket.id))
            if future is not None and not future.done():
                future.set_result(None)

    def _refuse(self, pool: str, refusal: Refusal) -> None:
        future = self._waiters.get((pool, refusal.ticket.id))
        if future is not None and not future.done():
            future.set_exception(rejection(refusal.reason, refusal.retry_after_s))
