"""One request in front of the pools' doors: where it waits, how long, and when it looks for another door."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from pdhub.api.errors import AdmissionRejected
from pdhub.api.policy import AdmissionOrder, Snapshot
from pdhub.api.request import RequestView
from pdhub.core.admission import DroppedReason, Ticket
from pdhub.core.doors import MOVES, find_door, look_at, told_at
from pdhub.router.context import Context
from pdhub.router.flight import Flight
from pdhub.router.gate import rejection

log = logging.getLogger("pdhub.router")

RESTLESS = 64
"""So many moves end a request: its policy sends it away from wherever it gets in."""


class Line:
    """Args:
    deadline: monotonic seconds at which its first token is due.

    ``weighed`` is its ticket in front of prefill instances: it weighs the tokens that they would have to compute.
    """

    def __init__(self, context: Context, flight: Flight, view: RequestView, deadline: float) -> None:
        self._context = context
        self._flight = flight
        self._view = view
        self._deadline = deadline
        self._pool: str | None = None
        self._moves = 0
        self._told_s = 0.0
        now = context.clock()
        last = told_at(flight.arrived, deadline, now)
        rank, sheddable = _ordered(flight.rules.order, view, deadline, now)
        self._ticket = Ticket(flight.id, last, view.priority, view.tenant, flight.arrived, rank, sheddable)
        self.weighed = replace(self._ticket, weight=context.fleet.latency.freeze(now).uncached(view))

    def snapshot(self, now: float, inside: str | None = None) -> Snapshot:
        """What the policy sees: in front of each pool and each prefill instance only those wait that enter before this
        request.

        Args:
            inside: the pool in which it has a place.
        """
        context = self._context
        pending = {p.name: p.pending_tokens for p in context.fleet.prefills.values() if p.usable(now)}
        backlog = context.lines.backlog(pending, self.weighed)
        return context.fleet.snapshot(now, inside, context.gate.ahead(self._ticket), backlog)

    def door(self, nodes: Sequence[tuple[str, str]], inside: str | None = None, *, waits: bool = False) -> str:
        """The pool to wait at.

        Args:
            nodes: those that may serve it, in the policy's order; at least one.
            inside: the pool in which it has a place. waits: all the same it waits, for its turn at a prefill instance.

        Raises:
            AdmissionRejected: it is sheddable, and every pool would serve it too late.
        """
        admission = self._flight.rules.admission
        fixed = self._moves >= MOVES or not admission.spill
        if fixed and inside is not None and any(pool == inside for pool, _ in nodes):
            return inside
        if not admission.spill:
            nodes = [(pool, node) for pool, node in nodes if pool == nodes[0][0]]
        now = self._context.clock()
        gate = self._context.gate
        way = find_door(
            self._view,
            nodes,
            self.snapshot(now, inside),
            self._deadline,
            now,
            opens=self.opens,
            wait_s=lambda pool: gate.predicted_wait(pool, self._ticket),
            inside=inside,
        )
        if not way.in_time and (inside is None or waits) and self._ticket.sheddable and admission.shed:
            raise self.shed(way.pool)
        return way.pool

    def ahead(self, pool: str) -> tuple[int, float | None]:
        """How many of those that wait there enter before it, and the seconds until it would; None = unknown."""
        gate = self._context.gate
        return gate.ahead(self._ticket)[pool], gate.predicted_wait(pool, self._ticket)

    def opens(self, pool: str) -> bool:
        """The pool would let it in, or let it wait."""
        return self._context.gate.opens(pool, self._ticket)

    def offer(self, pool: str) -> bool:
        """Ask for a place: True = it is there, False = :meth:`wait` for it. Pair with :meth:`leave` in either case.

        Raises:
            AdmissionRejected: the queue is full, or nobody is there.
        """
        self._moves += 1
        if self._moves > RESTLESS:
            raise rejection(DroppedReason.INTERNAL)
        self._flight.pool = self._pool = pool
        return self._context.gate.offer(pool, self._ticket)

    async def busy(self, pool: str, elsewhere: Callable[[str], bool], retry_after_s: float | None) -> bool:
        """Every node of the pool in which it has a place is busy: wait again. As :meth:`wait`.

        Args:
            retry_after_s: what a node told.
        """
        self._told_s = max(self._told_s, retry_after_s or 0.0)
        self._context.gate.busy(pool, self._ticket)
        return await self.wait(pool, elsewhere)

    def leave(self, *, served: bool) -> None:
        """Give back the place, or stop waiting. ``served``: it ran to its end."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            self._context.gate.leave(pool, self._ticket.id, served=served)

    def shed(self, pool: str) -> AdmissionRejected:
        """The refusal of a request that nobody can serve in time, and that need not be served."""
        wait = self._context.gate.predicted_wait(pool)
        return rejection(DroppedReason.SATURATED, wait, shed=True)

    async def wait(self, pool: str, elsewhere: Callable[[str], bool]) -> bool:
        """Until it has its place. False: another door is better by now.

        Args:
            elsewhere: asked from time to time while waiting; may raise what ends the request.

        Raises:
            AdmissionRejected: no place in time, shed, or the router shuts down.
        """
        gate, clock = self._context.gate, self._context.clock
        since = clock()
        try:
            while not await gate.wait(pool, self._ticket, look_at(self._deadline, clock())):
                if elsewhere(pool) and self._moves < MOVES:
                    return False
            return True
        except AdmissionRejected as error:
            if error.contended:
                error.retry_after_s = max(self._told_s, error.retry_after_s or 0.0)
            raise
        finally:
            self._flight.queued_s += clock() - since


def _ordered(order: AdmissionOrder, view: RequestView, deadline: float, now: float) -> tuple[tuple[float, ...], bool]:
    """What the order says; the default rule in place of one that fails, so that nobody is refused for it."""
    try:
        rank = tuple(float(number) for number in order.rank(view, deadline, now))
        return rank, bool(order.sheddable(view))
    except Exception:  # a plugin's
        log.exception("the admission order failed for request %s", view.id)
        return (), view.priority < 0
