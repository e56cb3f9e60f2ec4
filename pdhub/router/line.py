"""One request in front of the pools' doors: where it waits, how long, and when it looks for another door."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pdhub.api.errors import AdmissionRejected
from pdhub.api.policy import AdmissionOrder, Prediction, Snapshot
from pdhub.api.request import RequestView
from pdhub.core.admission import DroppedReason, Ticket
from pdhub.core.spill import Door, choose_door
from pdhub.router.context import Context
from pdhub.router.flight import Flight
from pdhub.router.gate import AT_ONCE_S, rejection

log = logging.getLogger("pdhub.router")

TELL_S = 0.02
TELL_SHARE = 0.05
"""A request that cannot be served in time is told a little before that time is over: so many seconds, or that share
of all it has."""

LOOK_S = (0.05, 1.0)
LOOK_SHARE = 0.25
"""Who waits looks again after a quarter of what is left, within these bounds: seldom while there is time, soon when
there is not."""

NODES = 8
"""So many nodes of a pool, in the policy's order, are asked what they would do: it starts with the best."""

MOVES = 8
"""After so many moves from door to door a request stays where it is."""

RESTLESS = 64
"""Nor does it go on for ever when a policy sends it away from wherever it gets in."""


class Line:
    """Args:
    deadline: monotonic seconds at which its first token is due.
    """

    def __init__(self, context: Context, flight: Flight, view: RequestView, deadline: float) -> None:
        self._context = context
        self._flight = flight
        self._view = view
        self._deadline = deadline
        self._pool: str | None = None
        self._moves = 0
        self._told_s = 0.0
        now, budget = context.clock(), deadline - flight.arrived
        last = max(deadline - min(TELL_S, TELL_SHARE * budget), now + AT_ONCE_S)
        rank, sheddable = _ordered(flight.rules.order, view, deadline, now)
        self._ticket = Ticket(flight.id, last, view.priority, view.tenant, flight.arrived, rank, sheddable)

    def snapshot(self, now: float, inside: str | None = None) -> Snapshot:
        """What the policy sees: in front of each pool only those wait that enter before this request.

        Args:
            inside: the pool in which it has a place.
        """
        return self._context.fleet.snapshot(now, inside, self._context.gate.ahead(self._ticket))

    def door(self, nodes: Sequence[tuple[str, str]], inside: str | None = None) -> str:
        """The pool to wait at.

        Args:
            nodes: those that may serve it, in the policy's order; at least one.
            inside: the pool in which it has a place.

        Raises:
            AdmissionRejected: it is sheddable, and every pool would serve it too late.
        """
        pools = list(dict.fromkeys(pool for pool, _ in nodes))
        admission = self._flight.rules.admission
        if inside in pools and (self._moves >= MOVES or not admission.spill):
            return str(inside)
        if not admission.spill:
            pools = pools[:1]
        now = self._context.clock()
        snapshot = self.snapshot(now, inside)
        doors = []
        left_ms = (self._deadline - now) * 1000
        for pool in pools:
            doors.append(self._door(pool, [n for p, n in nodes if p == pool], snapshot, now, inside))
            if len(doors) == 1 and inside is None:  # as a rule the first will do, and nobody else is asked
                way = choose_door(doors, self._view.slo, left_ms)
                if way.in_time and self._attains(doors[0]):
                    return pool
        way = choose_door(doors, self._view.slo, left_ms, inside)
        if not way.in_time and inside is None and self._ticket.sheddable and admission.shed:
            raise self.shed(way.pool)
        return way.pool

    def ahead(self, pool: str) -> tuple[int, float | None]:
        """How many of those that wait there enter before it, and the seconds until it would; None = unknown."""
        gate = self._context.gate
        return gate.ahead(self._ticket)[pool], gate.predicted_wait(pool, self._ticket)

    def opens(self, pool: str) -> bool:
        """The pool would let it in, or let it wait."""
        return self._context.gate.opens(pool, self._ticket)

    async def enter(self, pool: str, elsewhere: Callable[[str], bool]) -> bool:
        """Wait for a place. False: another door is better by now. Pair with :meth:`leave` in any case.

        Args:
            elsewhere: asked from time to time while waiting; may raise what ends the request.

        Raises:
            AdmissionRejected: no place in time, shed, or nobody is there.
        """
        self._moves += 1
        if self._moves > RESTLESS:
            raise rejection(DroppedReason.INTERNAL)
        self._flight.pool = self._pool = pool
        if self._context.gate.offer(pool, self._ticket):
            return True
        return await self._wait(pool, elsewhere)

    async def busy(self, pool: str, elsewhere: Callable[[str], bool], retry_after_s: float | None) -> bool:
        """Every node of the pool in which it has a place is busy: wait again. As :meth:`enter`.

        Args:
            retry_after_s: what a node told.
        """
        self._told_s = max(self._told_s, retry_after_s or 0.0)
        self._context.gate.busy(pool, self._ticket)
        return await self._wait(pool, elsewhere)

    def leave(self, *, served: bool) -> None:
        """Give back the place, or stop waiting. ``served``: it ran to its end."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            self._context.gate.leave(pool, self._ticket.id, served=served)

    def shed(self, pool: str) -> AdmissionRejected:
        """The refusal of a request that nobody can serve in time, and that need not be served."""
        wait = self._context.gate.predicted_wait(pool)
        return rejection(DroppedReason.SATURATED, wait, shed=True)

    async def _wait(self, pool: str, elsewhere: Callable[[str], bool]) -> bool:
        gate, clock = self._context.gate, self._context.clock
        since = clock()
        try:
            while not await gate.wait(pool, self._ticket, self._look_at()):
                if elsewhere(pool) and self._moves < MOVES:
                    return False
            return True
        except AdmissionRejected as error:
            if error.contended:
                error.retry_after_s = max(self._told_s, error.retry_after_s or 0.0)
            raise
        finally:
            self._flight.queued_s += clock() - since

    def _look_at(self) -> float:
        now = self._context.clock()
        least, most = LOOK_S
        return now + min(most, max(least, LOOK_SHARE * (self._deadline - now)))

    def _attains(self, door: Door) -> bool:
        target = self._view.slo.tpot_ms
        return target is None or door.tpot_ms is None or door.tpot_ms <= target

    def _door(self, pool: str, nodes: Sequence[str], snapshot: Snapshot, now: float, inside: str | None) -> Door:
        opens = pool == inside or self._context.gate.opens(pool, self._ticket)
        seen = [self._predict(snapshot, pool, node, now) for node in nodes[:NODES]]
        best = min(seen, key=lambda p: (self._misses(p, now), p.ttft_ms is not None, p.ttft_ms or 0.0))
        ttft = best.ttft_ms
        if ttft is None and pool != inside:
            wait = self._context.gate.predicted_wait(pool, self._ticket)
            ttft = None if not wait else wait * 1000
        return Door(pool, opens, ttft, best.tpot_ms)

    def _misses(self, seen: Prediction, now: float) -> int:
        """How many targets it would miss."""
        late = seen.ttft_ms is not None and seen.ttft_ms > (self._deadline - now) * 1000
        target = self._view.slo.tpot_ms
        return late + (target is not None and seen.tpot_ms is not None and seen.tpot_ms > target)

    def _predict(self, snapshot: Snapshot, pool: str, node: str, now: float) -> Prediction:
        view = next(p for p in snapshot.pools if p.name == pool)
        seen = next(n for n in view.nodes if n.name == node)
        return snapshot.latency.predict(self._view, view, seen, now)


def _ordered(order: AdmissionOrder, view: RequestView, deadline: float, now: float) -> tuple[tuple[float, ...], bool]:
    """What the order says; the default rule in place of one that fails, so that nobody is refused for it."""
    try:
        rank = tuple(float(number) for number in order.rank(view, deadline, now))
        return rank, bool(order.sheddable(view))
    except Exception:  # a plugin's
        log.exception("the admission order failed for request %s", view.id)
        return (), view.priority < 0
