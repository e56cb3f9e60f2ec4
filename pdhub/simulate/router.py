"""The router's decisions under virtual time: the same policy, admission queue and latency model as the real one, and
the same steps: choose, wait at the pool's door, choose again, prefill, hand over, decode."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pdhub.api.policy import Decision, Policy, Reason
from pdhub.api.request import RequestRecord, RequestView
from pdhub.core.admission import Offer, Outcome, Ticket
from pdhub.core.latency import PREFILL, LatencyModel, Sample
from pdhub.simulate.engine import Prefill
from pdhub.simulate.fleet import NodeState, Picture, PoolState
from pdhub.simulate.loop import Loop
from pdhub.simulate.result import Done
from pdhub.simulate.workload import Arrival

SEGMENT_S = 0.5
LEAST_TOKENS = 4
"""TPOT is learned while tokens come, from pieces of so many seconds and at least so many tokens, as the router does."""

UNTOLD_S = 10.0
"""First sign of life of a request of which nothing could be predicted."""

LOOKS = 8
"""A request that a policy sends from door to door stays at the last one after so many looks."""


class Flight:
    """One request on its way. Times are virtual seconds."""

    __slots__ = (
        "area",
        "backlog",
        "cached",
        "concurrency",
        "deadline",
        "first_s",
        "looks",
        "node",
        "pool",
        "predicted_tpot",
        "predicted_ttft",
        "predicted_wait",
        "prefill",
        "queued_s",
        "ready_s",
        "reason",
        "request",
        "sent_s",
        "since_s",
        "view",
    )  # fmt: skip

    def __init__(self, request: Arrival, view: RequestView, deadline: float) -> None:
        self.request = request
        self.view = view
        self.deadline = deadline
        self.looks = 0
        self.area = 0.0
        self.queued_s = self.since_s = self.sent_s = self.ready_s = 0.0
        self.first_s: float | None = None
        self.pool: PoolState | None = None
        self.node: NodeState | None = None
        self.prefill: str | None = None
        self.reason = ""
        self.cached = self.backlog = 0
        self.concurrency = 0
        self.predicted_ttft: float | None = None
        self.predicted_tpot: float | None = None
        self.predicted_wait: float | None = None


class Router:
    """Args:
    model: name that requests carry. budget_s: how long one without a TTFT target may wait.
    prefill_policy: chooses the prefill instance. finished: told of every request's end.
    """

    def __init__(
        self,
        loop: Loop,
        picture: Picture,
        policy: Policy,
        prefill_policy: Policy,
        latency: LatencyModel,
        *,
        model: str,
        budget_s: float,
        finished: Callable[[Done], None],
        seed: int = 0,
    ) -> None:
        self._loop = loop
        self._picture = picture
        self._policy = policy
        self._prefill_policy = prefill_policy
        self._latency = latency
        self._model = model
        self._models = frozenset({model})
        self._budget_s = budget_s
        self._finished = finished
        self._rng = random.Random(seed)
        self._waiting: dict[str, Flight] = {}

    def arrive(self, request: Arrival) -> None:
        """A request comes, now."""
        now, slo = self._loop.now, request.cls.slo()
        view = RequestView(
            id=request.id,
            model=self._model,
            endpoint="/v1/chat/completions",
            prompt_tokens=request.estimate,
            slo=slo,
            stream=True,
            tenant=request.tenant,
            priority=request.cls.priority,
            prefix=request.prefix,
            seen_tokens=self._latency.seen_tokens(request.prefix, request.estimate),
            arrived_s=now or 1e-9,  # 0 means that nobody stamped it
        )
        budget = self._budget_s if slo.ttft_ms is None else slo.ttft_ms / 1000
        flight = Flight(request, view, now + budget)
        self._look(flight)

    # choosing and waiting

    def _look(self, flight: Flight) -> None:
        decision = self._choose(flight)
        if not decision.order:
            shed = decision.reason is Reason.SHED
            self._end(flight, "refused", "shed" if shed else decision.reason.value)
            return
        pool = self._picture.pools[decision.order[0][0]]
        flight.pool, flight.since_s = pool, self._loop.now
        view = flight.view
        deadline = max(flight.deadline, self._loop.now + 0.001)
        ticket = Ticket(view.id, deadline, view.priority, view.tenant, view.arrived_s)
        offer = pool.door.offer(ticket, self._loop.now)
        self._evicted(offer, view.id)
        if offer.outcome is Outcome.REFUSED:
            self._end(flight, "refused", offer.refusals[0].reason.value)
        elif offer.outcome is Outcome.QUEUED:
            self._waiting[view.id] = flight
            self._loop.at(deadline, self._expire, pool)
        else:
            self._send(flight, decision)

    def _choose(self, flight: Flight) -> Decision:
        now = self._loop.now
        flight.looks += 1
        self._heartbeat(now)
        return self._policy.choose(flight.view, self._picture.decode(now), now, self._rng)

    def _admitted(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            flight = self._waiting.pop(ticket.id)
            flight.queued_s += self._loop.now - flight.since_s
            decision = self._choose(flight)
            pool = flight.pool
            assert pool is not None
            if not decision.order:
                self._give_up_place(flight)
                self._end(flight, "refused", decision.reason.value)
            elif decision.order[0][0] != pool.name and flight.looks < LOOKS:
                self._give_up_place(flight)
                self._look(flight)
            else:
                self._send(flight, decision)

    def _give_up_place(self, flight: Flight) -> None:
        assert flight.pool is not None
        self._admitted(flight.pool.door.cancel(flight.view.id, self._loop.now))

    def _evicted(self, offer: Offer, mine: str) -> None:
        for refusal in offer.refusals:
            if refusal.ticket.id != mine:
                other = self._waiting.pop(refusal.ticket.id)
                other.queued_s += self._loop.now - other.since_s
                self._end(other, "refused", refusal.reason.value)

    def _expire(self, pool: PoolState) -> None:
        for refusal in pool.door.expire(self._loop.now):
            flight = self._waiting.pop(refusal.ticket.id)
            flight.queued_s += self._loop.now - flight.since_s
            self._end(flight, "refused", refusal.reason.value)

    # the two legs

    def _send(self, flight: Flight, decision: Decision) -> None:
        pool, now = flight.pool, self._loop.now
        assert pool is not None
        mine = [pool.nodes[name] for p, name in decision.order if p == pool.name]
        free = [node for node in mine or pool.nodes.values() if node.in_flight < node.places]
        # Admitted, so that the pool has a free place; the chosen node may have none.
        node = free[0] if free else min(pool.nodes.values(), key=lambda n: n.in_flight - n.places)
        flight.node, flight.reason, flight.sent_s = node, decision.reason.value, now
        flight.concurrency = node.in_flight + 1
        view = pool.view
        if view is not None and node.view is not None:
            seen = self._latency.freeze(now)
            if self._picture.backlog:
                seen = seen.with_backlog(min(self._picture.backlog.values()))
            predicted = seen.predict(flight.view, view, node.view, now)
            flight.predicted_ttft, flight.predicted_tpot, flight.predicted_wait = predicted
        node.enter(flight.view.slo.tpot_ms, now)
        self._latency.remember(flight.view.prefix)
        self._prefill(flight, self._instance(flight, node))

    def _instance(self, flight: Flight, node: NodeState) -> Prefill | None:
        if node.engine.prefill is not None:
            flight.backlog = node.pending_tokens
            node.pending_tokens += flight.view.prompt_tokens
            return node.engine.prefill
        if not self._picture.prefills:
            return None
        picture, now = self._picture, self._loop.now
        decision = self._prefill_policy.choose(flight.view, picture.prefill(self._models, now), now, self._rng)
        name = decision.order[0][1]
        flight.prefill, flight.backlog = name, picture.backlog[name]
        picture.backlog[name] += flight.view.prompt_tokens
        picture.prefill_in_flight[name] += 1
        return picture.prefills[name]

    def _prefill(self, flight: Flight, instance: Prefill | None) -> None:
        node, request = flight.node, flight.request
        assert node is not None
        if instance is not None:
            instance.submit(request, lambda cached: self._prefilled(flight, cached))
        computed = self._loop.now if instance is None else instance.tail_s
        node.coming[flight.view.id] = (computed + node.engine.start_s(request), request)
        if instance is None:
            self._prefilled(flight, 0)

    def _prefilled(self, flight: Flight, cached: int) -> None:
        node, now, prompt = flight.node, self._loop.now, flight.request.prompt_tokens
        assert node is not None
        flight.cached = cached
        if flight.prefill is not None:
            self._picture.backlog[flight.prefill] -= flight.view.prompt_tokens
            self._picture.prefill_in_flight[flight.prefill] -= 1
            self._latency.observe(
                Sample(
                    PREFILL,
                    flight.prefill,
                    now,
                    prompt_tokens=prompt,
                    cached_tokens=cached,
                    seen_tokens=flight.view.seen_tokens,
                    backlog_tokens=flight.backlog,
                    ttft_ms=(now - flight.sent_s) * 1000,
                )
            )
        elif node.engine.prefill is not None:
            node.pending_tokens -= flight.view.prompt_tokens
            node.view = None
        self._loop.at(now + node.engine.start_s(flight.request), self._ready, flight)

    def _owed(self, flight: Flight) -> None:
        """From now on its first token is the node's business."""
        assert flight.node is not None
        ttft, wait = flight.predicted_ttft, flight.predicted_wait
        due = flight.sent_s + (UNTOLD_S if ttft is None else ttft / 1000)
        due = max(due, self._loop.now + (wait or 0.0) / 1000)
        self._latency.begin(flight.node.pool, flight.node.name, flight.view.id, due)

    def _ready(self, flight: Flight) -> None:
        flight.ready_s = self._loop.now
        self._owed(flight)
        assert flight.node is not None
        del flight.node.coming[flight.view.id]
        flight.node.engine.ready(flight.request, lambda: self._first(flight), lambda: self._done(flight))

    def _first(self, flight: Flight) -> None:
        node, now = flight.node, self._loop.now
        assert node is not None
        flight.first_s, flight.area = now, node.area(now)
        total = (now - flight.sent_s) * 1000
        wait = (now - flight.ready_s) * 1000
        self._latency.progress(node.pool, node.name, flight.view.id, now)
        self._latency.compare(node.pool, "ttft", flight.predicted_ttft, total)
        self._latency.observe(
            Sample(
                node.pool,
                node.name,
                now,
                prompt_tokens=flight.request.prompt_tokens,
                cached_tokens=flight.cached,
                seen_tokens=flight.view.seen_tokens,
                backlog_tokens=flight.backlog,
                ttft_ms=total - wait,
            )
        )

    def _done(self, flight: Flight) -> None:
        node, pool, request, now = flight.node, flight.pool, flight.request, self._loop.now
        assert node is not None
        assert pool is not None
        assert flight.first_s is not None
        tpot = None
        if request.output_tokens > 1:
            tpot = (now - flight.first_s) * 1000 / (request.output_tokens - 1)
            self._learn_rest(flight, node, tpot, now)
        node.leave(flight.view.slo.tpot_ms, now)
        ttft = (flight.first_s - request.at_s) * 1000
        self._latency.end(pool.name, node.name, flight.view.id)
        self._latency.observe(Sample(pool.name, node.name, now, output_tokens=request.output_tokens))
        self._latency.compare(pool.name, "tpot", flight.predicted_tpot, tpot)
        self._end(flight, "ok", None, ttft, tpot)
        self._admitted(pool.door.release(flight.view.id, now))

    # what the router sees of running requests

    def _heartbeat(self, now: float) -> None:
        """Tokens came from nodes that run something: a sign of life, and now and then a measured TPOT."""
        for pool in self._picture.pools.values():
            for node in pool.nodes.values():
                if node.engine.running:
                    steps = node.engine.steps()
                    if steps >= node.mark_steps + LEAST_TOKENS:
                        self._latency.progress(pool.name, node.name, "", now)
                        if now >= node.mark_s + SEGMENT_S:
                            self._segment(node, steps, now)

    def _segment(self, node: NodeState, steps: float, now: float) -> None:
        elapsed, area = now - node.mark_s, node.area(now)
        running = (area - node.mark_area) / elapsed
        each = elapsed * 1000 / (steps - node.mark_steps)
        for run in node.engine.running:
            if run.begun <= node.mark_steps:
                self._observe(node, run.request, each * run.slow, running, node.engine.produced(run), now)
        node.mark_s, node.mark_steps, node.mark_area = now, steps, area

    def _learn_rest(self, flight: Flight, node: NodeState, tpot: float, now: float) -> None:
        """What was not yet learned from this request: since the last mark, or since it began if that was later."""
        assert flight.first_s is not None
        begun = flight.first_s
        since, area = (begun, flight.area) if begun > node.mark_s else (node.mark_s, node.mark_area)
        elapsed = now - since
        tokens = flight.request.output_tokens - 1
        if elapsed * 1000 / tpot >= LEAST_TOKENS:
            running = (node.area(now) - area) / elapsed
            self._observe(node, flight.request, tpot, running, tokens, now)

    def _observe(
        self, node: NodeState, request: Arrival, tpot: float, running: float, produced: int, now: float
    ) -> None:
        self._latency.observe(
            Sample(
                node.pool,
                node.name,
                now,
                prompt_tokens=request.prompt_tokens,
                tpot_ms=tpot,
                running=min(max(1.0, running), node.engine.cost.slots),
                context_tokens=request.prompt_tokens + produced,
            )
        )

    def _end(
        self,
        flight: Flight,
        outcome: str,
        error: str | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> None:
        request = flight.request
        pool, node = flight.pool, flight.node
        record = RequestRecord(
            id=flight.view.id,
            model=self._model,
            pool=pool.name if pool else None,
            node=node.name if node else None,
            prefill=flight.prefill,
            reason=flight.reason,
            outcome=outcome,
            error_code=error,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=request.output_tokens if outcome == "ok" else 0,
            ttft_ms=ttft,
            tpot_ms=tpot,
            total_ms=(self._loop.now - request.at_s) * 1000,
            slo=flight.view.slo,
            queued_ms=flight.queued_s * 1000,
            concurrency=flight.concurrency or None,
            predicted_ttft_ms=flight.predicted_ttft,
            predicted_tpot_ms=flight.predicted_tpot,
            prefix=flight.view.prefix,
        )
        self._policy.observe(record)
        self._prefill_policy.observe(record)
        self._finished(Done(request, record, pool.cost if pool else 0.0))
