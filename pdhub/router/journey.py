"""The part of a request's life that may repeat: choose, wait for a place, attempt."""

from __future__ import annotations

from pdhub.api.errors import (
    AdmissionRejected,
    InvalidRequest,
    LayoutMismatch,
    RequestError,
    TransferFailed,
    Unsupported,
)
from pdhub.api.policy import Decision, Reason
from pdhub.api.request import RequestView
from pdhub.router import sampling as sampling_rules
from pdhub.router import shadow
from pdhub.router.attempt import Attempt, Choice
from pdhub.router.breaker import acquire_all
from pdhub.router.context import Context
from pdhub.router.endpoint import Endpoint
from pdhub.router.errors import no_endpoints
from pdhub.router.fleet import Pool, fits
from pdhub.router.flight import Flight
from pdhub.router.line import Line
from pdhub.router.nobody import nobody
from pdhub.router.openai import ClientRequest
from pdhub.router.prefills import choose_prefill
from pdhub.router.sink import Sink
from pdhub.router.turn import Turn
from pdhub.router.view import view_of

CONTEXT_CODE = "context_length_exceeded"

Chosen = tuple[Decision, list[tuple[str, str]]]
"""A decision, and of its (pool, node)s those that were not tried yet."""


class Journey:
    """Args:
    context: what all requests share. flight: filled in on the way.
    """

    def __init__(self, context: Context, request: ClientRequest, flight: Flight, sink: Sink) -> None:
        self._context = context
        self._request = request
        self._flight = flight
        self._sink = sink
        self._sampling = sampling_rules.resolve(request.body, context.sampling_defaults())
        self._view = self._look()
        self._deadline = flight.deadline
        self._line = Line(context, flight, self._view, self._deadline)
        self._turn = Turn(context, flight, self._line.weighed, self._deadline)
        self._tried: set[str] = set()
        self._tried_prefills: set[str] = set()
        self._widest = 0
        self._failures = 0
        self._error: RequestError | None = None

    async def run(self) -> None:
        """Until the client has its answer. Raises a RequestError."""
        compared = False
        while True:
            decision, nodes = self._choose()
            if not compared:
                compared = True
                shadow.compare(self._context, self._flight.rules.policy, self._view, decision)
            if not nodes:
                raise self._nobody(decision)
            pool = self._context.fleet.pools[self._line.door(nodes)]
            if await self._in_pool(pool, (decision, nodes)):
                return

    def _choose(self, inside: str | None = None) -> Chosen:
        """The policy's order, without what was tried. ``inside``: the pool that has let the request in."""
        context = self._context
        now = context.clock()
        snapshot = self._line.snapshot(now, inside)
        flight = self._flight
        decision = flight.decision = flight.rules.policy.choose(self._view, snapshot, now, context.rng)
        flight.entry = context.decisions.note(flight.entry, self._view, decision, flight.rules.version)
        nodes = [
            (pool, node)
            for pool, node in decision.order
            if node not in self._tried and context.fleet.pools[pool].capabilities.max_context > self._widest
        ]
        return decision, nodes

    async def _in_pool(self, pool: Pool, chosen: Chosen) -> bool:
        """Wait for a place in the pool and use it. False: look elsewhere.

        Args:
            chosen: of this very moment.
        """
        served = False
        try:
            if not self._line.offer(pool.name):
                if not await self._line.wait(pool.name, self._elsewhere):
                    return False
                served = await self._use_place(pool, None)
            else:
                # In front of a pool that let it in at once nobody waits, as a rule: it would be chosen for again.
                alone = not self._context.gate.waiting()[pool.name]
                served = await self._use_place(pool, chosen if alone else None)
            return served
        finally:
            self._turn.leave()
            self._line.leave(served=served)

    def _elsewhere(self, pool: str) -> bool:
        """Asked while it waits: should it wait at another pool? Raises if nobody is left, or the policy sheds it."""
        decision, nodes = self._choose()
        if not nodes:
            raise self._nobody(decision)
        return self._line.door(nodes) != pool

    async def _use_place(self, pool: Pool, chosen: Chosen | None) -> bool:
        """Args:
        chosen: of this very moment, with this pool as the door; None = choose again.
        """
        while True:
            mine = self._mine(pool, chosen)
            decision = self._flight.decision
            chosen = None
            if not mine or decision is None:
                return False
            busy: AdmissionRejected | None = None
            for node in mine:
                at_once = self._ask_turn(pool, node)
                if at_once is None:
                    continue
                if not at_once:
                    if not await self._turn.wait(lambda: self._ahead(pool)):
                        return False
                    break
                self._flight.reason = self._reason(decision, pool.name, node)
                try:
                    if await self._attempt(pool, node):
                        return True
                except AdmissionRejected as error:
                    if not error.contended or self._sink.started:
                        raise
                    busy = error
                if self._widest >= pool.capabilities.max_context:
                    return False
            else:
                # If none was busy, all were tried and are out: the next look says what is left.
                self._turn.leave()
                if busy and not await self._line.busy(pool.name, self._elsewhere, busy.retry_after_s):
                    return False

    def _mine(self, pool: Pool, chosen: Chosen | None = None, *, waits: bool = False) -> list[str]:
        """Nodes of the pool in which it has a place, best first; none if it should be elsewhere.

        Args:
            chosen: of this very moment, with this pool as the door. waits: it waits for its turn at a prefill instance.
        """
        _, nodes = chosen or self._choose(pool.name)
        mine = [node for name, node in nodes if name == pool.name]
        if mine and chosen is None and self._line.door(nodes, pool.name, waits=waits) != pool.name:
            return []
        return mine

    def _ask_turn(self, pool: Pool, node: str) -> bool | None:
        """Whether its prompt may be sent at once to an instance that fits the node; False: its turn has to be waited
        for. None: there is no instance, and the node is out."""
        if not pool.needs_prefill:
            return True
        able = self._able(pool, node)
        if self._turn.instance in able:
            return True
        instance = self._instance(able, node)
        return None if instance is None else self._turn.offer(instance)

    def _ahead(self, pool: Pool) -> Endpoint | None:
        """Asked while it waits for its turn: the instance to wait for by now; None = it should be elsewhere. Raises if
        it is shed."""
        mine = self._mine(pool, waits=True)
        return self._instance(self._able(pool, mine[0]), mine[0]) if mine else None

    def _able(self, pool: Pool, node: str) -> list[Endpoint]:
        """Prefill instances that fit the node; with none it is out."""
        context, now = self._context, self._context.clock()
        try:
            return context.fleet.able_prefills(pool, pool.nodes[node], self._view, self._tried_prefills, now)
        except (LayoutMismatch, Unsupported, AdmissionRejected) as error:
            self._error = self._error or error
            self._tried.add(node)
            return []

    def _instance(self, able: list[Endpoint], node: str) -> Endpoint | None:
        """The one that the policy takes; None: none, and the node is out."""
        context, now = self._context, self._context.clock()
        if not able:
            return None
        try:
            return choose_prefill(context, self._flight, self._view, able, self._line.weighed, now)
        except AdmissionRejected as error:
            self._error = self._error or error
            self._tried.add(node)
            return None

    def _nobody(self, decision: Decision) -> RequestError:
        absent = any(c.dropped_by == "health" and c.node not in self._tried for c in decision.candidates)
        if isinstance(self._error, Unsupported) and absent:
            return no_endpoints("the node that could serve this request is not ready")
        if self._error is not None:
            return self._error
        waits = [self._context.gate.predicted_wait(name) for name in self._context.fleet.pools]
        known = [wait for wait in waits if wait is not None]
        context, retry_after_s = self._context, min(known, default=None)
        return nobody(decision, self._request, context.fleet, context.parsing, self._view, retry_after_s)

    async def _attempt(self, pool: Pool, node: str) -> bool:
        """One attempt on one node. False: it is out for this request. Raises AdmissionRejected if it is busy."""
        choice = self._pick(pool, node)
        if choice is None:
            return False
        flight, context = self._flight, self._context
        flight.node, flight.prefill = node, choice.prefill.name if choice.prefill else None
        now = context.clock()
        predicted = context.fleet.predict(self._view, pool.name, node, now)
        left = self._deadline - now
        attempt = Attempt(
            context, choice, self._request, self._view, self._sampling, flight, left, predicted, self._rebind,
            self._turn.answered,
        )  # fmt: skip
        flight.attempts += 1
        try:
            await attempt.run(self._sink)
        except AdmissionRejected as error:
            if self._sink.started:
                raise
            flight.attempts -= 1
            if error.contended:
                raise
            self._out(attempt, error)
            return False
        except Unsupported as error:
            if self._sink.started:
                raise
            self._error = error
            self._tried.update(pool.nodes)
            return False
        except InvalidRequest as error:
            if error.code != CONTEXT_CODE or self._sink.started:
                raise
            self._widest = pool.capabilities.max_context
            self._error = error
            return False
        except RequestError as error:
            self._failures += 1
            late = context.clock() > self._deadline
            if self._sink.started or late or self._failures > context.plan.config.router.retries:
                raise
            self._out(attempt, error)
            flight.restart()
            context.metrics.retries.labels(pool.name).inc()
            return False
        return True

    def _out(self, attempt: Attempt, error: RequestError) -> None:
        """Never the same one again."""
        self._error = error
        choice = attempt.choice
        if choice.prefill is not None and attempt.at is choice.prefill and not isinstance(error, TransferFailed):
            self._tried_prefills.add(choice.prefill.name)
        else:
            self._tried.add(choice.node.name)

    def _pick(self, pool: Pool, name: str) -> Choice | None:
        """The node with the prefill instance whose turn it has, both let in by their breakers; None if that cannot
        be."""
        context = self._context
        now = context.clock()
        node = pool.nodes[name]
        prefill = self._turn.instance if pool.needs_prefill else None
        breakers = [node.breaker]
        if prefill is not None:
            breakers += [prefill.breaker, context.fleet.pair(prefill.name, name)]
        let_in = not node.retiring and acquire_all(breakers, now)  # the choice may be older than that
        context.fleet.changed(node)
        if not let_in:
            self._error = self._error or no_endpoints("no node is ready")
            self._tried.add(name)
            return None
        return Choice(pool, node, prefill)

    def _rebind(self, choice: Choice) -> Endpoint | None:
        """The decode node once more, from fresh views; None = the one that it has. The pool and the prefill instance
        are settled: the KV lies there, in the pool's layout."""
        assert choice.prefill is not None
        context, flight, old = self._context, self._flight, choice.node
        decision, nodes = self._choose(choice.pool.name)
        for pool, name in nodes:
            if pool != choice.pool.name:
                continue
            node = choice.pool.nodes[name]
            if node is old:
                break
            if not fits(choice.prefill, choice.pool.client.accepts(node.info)):
                continue
            if not acquire_all([node.breaker, context.fleet.pair(choice.prefill.name, name)], context.clock()):
                continue
            old.breaker.neutral()
            context.fleet.pair(choice.prefill.name, old.name).neutral()
            flight.node, flight.moved_from, flight.reason = name, old.name, self._reason(decision, pool, name)
            context.metrics.rebound.labels(pool).inc()
            return node
        return None

    def _reason(self, decision: Decision, pool: str, node: str) -> str:
        first = decision.order[0]
        if self._failures and (pool, node) != first:
            return Reason.FALLBACK.value
        if pool != first[0]:
            return Reason.SPILL.value if self._error is None else Reason.FALLBACK.value
        return decision.reason.value

    def _look(self) -> RequestView:
        flight, pools = self._flight, self._context.fleet.pools.values()
        return view_of(
            self._request,
            flight.asked,
            self._sampling,
            [pool.capabilities for pool in pools],
            id=flight.id,
            headers=flight.headers,
            arrived_s=flight.arrived,
            wall_s=flight.wall_s,
            seen=self._context.fleet.latency.seen_tokens,
            cached=self._context.caches.shares(self._request),
        )
