"""The part of a request's life that may repeat: choose, wait for a place, attempt."""

from __future__ import annotations

from pdhub.api.errors import AdmissionRejected, InvalidRequest, LayoutMismatch, RequestError, TransferFailed
from pdhub.api.policy import Decision, Reason
from pdhub.api.request import RequestView
from pdhub.core.admission import DroppedReason, Ticket
from pdhub.router import sampling as sampling_rules
from pdhub.router import shadow
from pdhub.router.attempt import Attempt, Choice
from pdhub.router.breaker import acquire_all
from pdhub.router.context import Context
from pdhub.router.errors import no_endpoints
from pdhub.router.fleet import Pool, sampling_defaults
from pdhub.router.flight import Flight
from pdhub.router.gate import rejection
from pdhub.router.nobody import nobody
from pdhub.router.openai import ClientRequest
from pdhub.router.prefills import choose_prefill
from pdhub.router.sink import Sink
from pdhub.router.view import view_of

POLL_S = 0.05
"""Between two looks at busy nodes: another router may have freed one, and says nothing."""

CONTEXT_CODE = "context_length_exceeded"


class Journey:
    """Args:
    context: what all requests share. flight: filled in on the way.
    """

    def __init__(self, context: Context, request: ClientRequest, flight: Flight, sink: Sink) -> None:
        self._context = context
        self._request = request
        self._flight = flight
        self._sink = sink
        self._sampling = sampling_rules.resolve(request.body, sampling_defaults(context.fleet))
        self._view = self._look()
        target = flight.slo.ttft_ms
        budget = flight.rules.admission.default_budget_s if target is None else target / 1000
        self._deadline = flight.arrived + budget
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
                raise self._error or nobody(decision, self._request, self._context.fleet)
            pool = self._context.fleet.pools[nodes[0][0]]
            if await self._in_pool(pool):
                return

    def _choose(self, inside: str | None = None) -> tuple[Decision, list[tuple[str, str]]]:
        """The policy's order, without what was tried. ``inside``: the pool that has let the request in."""
        context = self._context
        now = context.clock()
        snapshot = context.fleet.snapshot(now, inside)
        flight = self._flight
        decision = flight.decision = flight.rules.policy.choose(self._view, snapshot, now, context.rng)
        flight.entry = context.decisions.note(flight.entry, self._view, decision, flight.rules.version)
        nodes = [
            (pool, node)
            for pool, node in decision.order
            if node not in self._tried and context.fleet.pools[pool].capabilities.max_context > self._widest
        ]
        return decision, nodes

    async def _in_pool(self, pool: Pool) -> bool:
        """Wait for a place in the pool and use it. False: look elsewhere, the pool's nodes are used up."""
        gate, flight = self._context.gate, self._flight
        view = self._view
        ticket = Ticket(flight.id, self._deadline, view.priority, view.tenant, flight.arrived)
        flight.pool = pool.name
        since = self._context.clock()
        await gate.enter(pool.name, ticket)
        flight.queued_s += self._context.clock() - since
        served = False
        try:
            served = await self._use_place(pool)
            return served
        finally:
            gate.leave(pool.name, ticket.id, served=served)

    async def _use_place(self, pool: Pool) -> bool:
        context = self._context
        while True:
            decision, nodes = self._choose(pool.name)
            mine = [node for name, node in nodes if name == pool.name]
            if not mine or nodes[0][0] != pool.name:
                return False
            busy: AdmissionRejected | None = None
            for node in mine:
                self._flight.reason = self._reason(decision, pool.name, node)
                try:
                    if await self._attempt(pool, node):
                        return True
                except AdmissionRejected as error:
                    if not error.contended:
                        raise
                    busy = error
                if self._widest >= pool.capabilities.max_context:
                    return False
            if busy is None:
                continue  # every one of them was tried and is out; the next look says what is left
            since = context.clock()
            if since + POLL_S > self._deadline:
                raise rejection(DroppedReason.TTL_EXPIRED, busy.retry_after_s)
            await context.gate.wait_freed(pool.name, POLL_S)
            self._flight.queued_s += context.clock() - since

    async def _attempt(self, pool: Pool, node: str) -> bool:
        """One attempt on one node. False: it is out for this request. Raises AdmissionRejected if it is busy."""
        choice = self._pick(pool, node)
        if choice is None:
            return False
        flight, context = self._flight, self._context
        flight.node, flight.prefill = node, choice.prefill.name if choice.prefill else None
        now = context.clock()
        predicted = context.fleet.predict(self._view, pool.name, node, now)
        attempt = Attempt(
            context, choice, self._request, self._view, self._sampling, flight, self._deadline - now, predicted
        )
        flight.attempts += 1
        try:
            await attempt.run(self._sink)
        except AdmissionRejected as error:
            if self._sink.started:
                raise
            flight.attempts -= 1
            if error.contended:
                raise
            self._out(choice, attempt, error)
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
            self._out(choice, attempt, error)
            flight.restart()
            context.metrics.retries.labels(pool.name).inc()
            return False
        return True

    def _out(self, choice: Choice, attempt: Attempt, error: RequestError) -> None:
        """Never the same one again."""
        self._error = error
        if choice.prefill is not None and attempt.at is choice.prefill and not isinstance(error, TransferFailed):
            self._tried_prefills.add(choice.prefill.name)
        else:
            self._tried.add(choice.node.name)

    def _pick(self, pool: Pool, name: str) -> Choice | None:
        """The node with a prefill instance that fits it, both let in by their breakers; None if that cannot be."""
        context = self._context
        now = context.clock()
        node = pool.nodes[name]
        prefill = None
        if pool.needs_prefill:
            try:
                prefill = choose_prefill(context, self._flight, self._view, pool, node, self._tried_prefills, now)
            except (LayoutMismatch, AdmissionRejected) as error:
                self._error = self._error or error
                self._tried.add(name)
                return None
        breakers = [node.breaker]
        if prefill is not None:
            breakers += [prefill.breaker, context.fleet.pair(prefill.name, name)]
        let_in = acquire_all(breakers, now)
        context.fleet.changed(node)
        if not let_in:
            self._error = self._error or no_endpoints("no node is ready")
            self._tried.add(name)
            return None
        return Choice(pool, node, prefill)

    def _reason(self, decision: Decision, pool: str, node: str) -> str:
        first = decision.order[0]
        if pool != first[0] or (self._failures and node != first[1]):
            return Reason.FALLBACK.value
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
        )
