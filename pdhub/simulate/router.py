"""The router's decisions under virtual time: the same policy, admission queue and latency model as the real one, and
the same steps: choose, wait at the pool's door, choose again, wait for a turn at a prefill instance, choose again,
prefill, hand over, decode."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdhub.api.policy import AdmissionOrder, Decision, Policy, Reason
from pdhub.api.request import RequestView
from pdhub.core.admission import DroppedReason, Outcome, Ticket
from pdhub.core.doors import MOVES, find_door, look_at, told_at
from pdhub.core.latency import PREFILL, LatencyModel, Sample
from pdhub.core.turns import restless
from pdhub.simulate.engine import Prefill
from pdhub.simulate.fleet import NodeState, Picture, PoolState
from pdhub.simulate.flight import Flight
from pdhub.simulate.heartbeat import Heartbeat
from pdhub.simulate.loop import Loop
from pdhub.simulate.result import Done
from pdhub.simulate.workload import Arrival


@dataclass(frozen=True, slots=True)
class Admission:
    """Args:
    budget_s: how long a request without a TTFT target may wait. spill, shed: as in the configuration.
    """

    order: AdmissionOrder
    budget_s: float = 30.0
    spill: bool = True
    shed: bool = True


class Router:
    """Args:
    model: name that requests carry.
    prefill_policy: chooses the prefill instance. finished: told of every request's end.
    """

    def __init__(
        self,
        loop: Loop,
        picture: Picture,
        policy: Policy,
        prefill_policy: Policy,
        latency: LatencyModel,
        admission: Admission,
        *,
        model: str,
        finished: Callable[[Done], None],
        seed: int = 0,
    ) -> None:
        self._loop = loop
        self._picture = picture
        self._policy = policy
        self._prefill_policy = prefill_policy
        self._latency = latency
        self._admission = admission
        self._model = model
        self._models = frozenset({model})
        self._finished = finished
        self._rng = random.Random(seed)
        self._heartbeat = Heartbeat(picture, latency)
        self._waiting: dict[str, Flight] = {}
        self._turns: dict[str, Flight] = {}
        self._planned: dict[str, float] = {}

    def arrive(self, request: Arrival) -> None:
        """A request comes, now."""
        now, slo, admission = self._loop.now, request.cls.slo(), self._admission
        self._heartbeat.heartbeat(now)
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
            arrived_s=now or 1e-9,  # 0 means that nobody stamped it
        )
        deadline = now + (admission.budget_s if slo.ttft_ms is None else slo.ttft_ms / 1000)
        rank, sheddable = admission.order.rank(view, deadline, now), admission.order.sheddable(view)
        told = told_at(now, deadline, now)
        ticket = Ticket(view.id, told, view.priority, view.tenant, view.arrived_s, rank, sheddable)
        self._look(Flight(request, view, deadline, ticket, self._latency.freeze(now).uncached(view)))

    # choosing and waiting

    def _look(self, flight: Flight) -> None:
        """Choose, find a door, and knock."""
        decision = self._choose(flight)
        found = self._door(flight, decision)
        if found is None:
            return
        pool = self._picture.pools[found]
        flight.pool, flight.since_s = pool, self._loop.now
        flight.moves += 1
        offer = pool.door.offer(flight.ticket, self._loop.now)
        for refusal in offer.refusals:
            if refusal.ticket.id != flight.view.id:
                self._refuse(self._stop_waiting(refusal.ticket.id), "shed" if refusal.shed else refusal.reason.value)
        if offer.outcome is Outcome.REFUSED:
            self._refuse(flight, offer.refusals[0].reason.value)
        elif offer.outcome is Outcome.ADMITTED:
            self._enter(flight, decision)
        else:
            self._waiting[flight.view.id] = flight
            flight.turn += 1
            self._loop.at(flight.ticket.deadline, self._expire, pool)
            self._loop.at(look_at(flight.deadline, self._loop.now), self._look_again, (flight, flight.turn))

    def _look_again(self, what: tuple[Flight, int]) -> None:
        """It still waits: would another door be better by now?"""
        flight, turn = what
        if turn != flight.turn or flight.view.id not in self._waiting:
            return
        pool = flight.pool
        assert pool is not None
        decision = self._choose(flight)
        found = self._door(flight, decision)
        if found == pool.name:
            self._loop.at(look_at(flight.deadline, self._loop.now), self._look_again, (flight, turn))
        elif found is not None:
            self._leave_queue(flight, pool)
            self._look(flight)

    def _door(
        self, flight: Flight, decision: Decision, inside: str | None = None, *, waits: bool = False
    ) -> str | None:
        """Name of the pool to wait at; None = it is over.

        Args:
            inside: the pool in which it has a place. waits: all the same it waits, for its turn.
        """
        now, admission = self._loop.now, self._admission
        if not decision.order:
            self._refuse(flight, "shed" if decision.reason is Reason.SHED else decision.reason.value)
            return None
        nodes = decision.order
        settled = flight.moves >= MOVES or not admission.spill
        if inside is not None and settled and any(pool == inside for pool, _ in nodes):
            return inside
        if not admission.spill:
            nodes = tuple(key for key in nodes if key[0] == nodes[0][0])
        pools, ticket = self._picture.pools, flight.ticket
        assert flight.snapshot is not None
        way = find_door(
            flight.view,
            nodes,
            flight.snapshot,
            flight.deadline,
            now,
            opens=lambda name: pools[name].door.opens(ticket, now) or (flight.pool is pools[name] and inside is None),
            wait_s=lambda name: pools[name].door.predicted_wait(now, pools[name].door.ahead(ticket)),
            inside=inside,
        )
        if not way.in_time and (inside is None or waits) and ticket.sheddable and admission.shed:
            self._refuse(flight, "shed")
            return None
        return way.pool

    def _choose(self, flight: Flight, inside: str | None = None) -> Decision:
        now = self._loop.now
        self._heartbeat.heartbeat(now)
        flight.snapshot = self._picture.decode(now, flight.ticket, flight.weighed, inside)
        return self._policy.choose(flight.view, flight.snapshot, now, self._rng)

    def _admitted(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._enter(self._stop_waiting(ticket.id))

    def _enter(self, flight: Flight, decision: Decision | None = None) -> None:
        """It has a place in its pool: choose the node, unless another pool is better by now.

        Args:
            decision: of this very moment.
        """
        pool = flight.pool
        assert pool is not None
        if decision is None or pool.door.waiting:
            decision = self._choose(flight, pool.name)
            found = self._door(flight, decision, pool.name)
            if found != pool.name:
                self._move(flight, found)
                return
        self._queue(flight, decision)

    def _move(self, flight: Flight, found: str | None) -> None:
        """It leaves its pool: for another one, or (None) for good."""
        pool = flight.pool
        assert pool is not None
        self._leave_line(flight)
        self._admitted(pool.door.cancel(flight.view.id, self._loop.now))
        if found is not None:
            self._look(flight)

    def _stop_waiting(self, id: str) -> Flight:
        flight = self._waiting.pop(id)
        flight.turn += 1
        flight.queued_s += self._loop.now - flight.since_s
        return flight

    def _leave_queue(self, flight: Flight, pool: PoolState) -> None:
        self._stop_waiting(flight.view.id)
        self._admitted(pool.door.cancel(flight.view.id, self._loop.now))

    def _refuse(self, flight: Flight, why: str) -> None:
        if flight.view.id in self._waiting and flight.pool is not None:
            self._leave_queue(flight, flight.pool)
        self._end(flight, "refused", why)

    def _expire(self, pool: PoolState) -> None:
        for refusal in pool.door.expire(self._loop.now):
            self._refuse(self._stop_waiting(refusal.ticket.id), refusal.reason.value)

    # waiting for a turn at a prefill instance

    def _queue(self, flight: Flight, decision: Decision) -> None:
        """It has a place: ask for its turn where its prompt will be computed."""
        pool, now = flight.pool, self._loop.now
        assert pool is not None
        if not pool.needs_prefill or not self._picture.prefills:
            self._send(flight, decision)
            return
        flight.line = self._instance(flight)
        offer = self._picture.lines[flight.line].offer(flight.weighed, now)
        if offer.outcome is Outcome.ADMITTED:
            self._send(flight, decision)
        elif offer.outcome is Outcome.REFUSED:
            flight.line = None
            self._end(flight, "refused", offer.refusals[0].reason.value)
            self._move(flight, None)
        else:
            self._turns[flight.view.id] = flight
            flight.turn += 1
            flight.since_s = now
            self._plan(flight.line)
            self._loop.at(flight.ticket.deadline, self._expire_turn, (flight, flight.turn))
            self._loop.at(look_at(flight.deadline, now), self._look_ahead, (flight, flight.turn))

    def _instance(self, flight: Flight) -> str:
        now = self._loop.now
        seen = self._picture.prefill(self._models, now, flight.weighed)
        return self._prefill_policy.choose(flight.view, seen, now, self._rng).order[0][1]

    def _look_ahead(self, what: tuple[Flight, int]) -> None:
        """It still waits for its turn: would it be better elsewhere by now?"""
        flight, turn = what
        if turn == flight.turn and self._stays(flight):
            self._loop.at(look_at(flight.deadline, self._loop.now), self._look_ahead, what)

    def _stays(self, flight: Flight) -> bool:
        """Where it waits for its turn. Otherwise it is on its way elsewhere, or at its end."""
        pool = flight.pool
        assert pool is not None
        decision = self._choose(flight, pool.name)
        found = self._door(flight, decision, pool.name, waits=True)
        if found != pool.name:
            self._move(flight, found)
            return False
        if self._instance(flight) == flight.line:
            return True
        self._leave_line(flight)
        self._queue(flight, decision)
        return False

    def _its_turn(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            flight = self._end_turn(ticket.id)
            pool = flight.pool
            assert pool is not None
            decision = self._choose(flight, pool.name)
            found = self._door(flight, decision, pool.name)
            if found == pool.name:
                self._send(flight, decision)
            else:
                self._move(flight, found)

    def _end_turn(self, id: str) -> Flight:
        flight = self._turns.pop(id)
        flight.turn += 1
        flight.queued_s += self._loop.now - flight.since_s
        return flight

    def _leave_line(self, flight: Flight) -> None:
        """It waits for no turn any more, or gives back the one that it has."""
        name, flight.line = flight.line, None
        if flight.view.id in self._turns:
            self._end_turn(flight.view.id)
        if name is not None:
            self._its_turn(self._picture.lines[name].cancel(flight.view.id, self._loop.now))
            self._plan(name)
            self._invite(name)

    def _plan(self, name: str) -> None:
        """Look again when the next one may be sent though nothing was answered."""
        at = self._picture.lines[name].next_s(self._loop.now)
        if at is not None:
            self._planned[name] = at
            self._loop.at(at, self._probe, (name, at))

    def _probe(self, what: tuple[str, float]) -> None:
        name, at = what
        if self._planned.get(name) == at:  # else something happened since
            self._its_turn(self._picture.lines[name].probe(self._loop.now))
            self._plan(name)

    def _invite(self, name: str) -> None:
        """An instance may have nothing to do while others have a line."""
        found = restless(self._picture.lines, name, self._loop.now)
        if found is not None:
            self._stays(self._turns[found[1].id])

    def _expire_turn(self, what: tuple[Flight, int]) -> None:
        flight, turn = what
        if turn == flight.turn:
            self._end(flight, "refused", DroppedReason.TTL_EXPIRED.value)
            self._move(flight, None)

    # the two legs

    def _send(self, flight: Flight, decision: Decision) -> None:
        pool, now, snapshot = flight.pool, self._loop.now, flight.snapshot
        assert pool is not None
        assert snapshot is not None
        mine = [pool.nodes[name] for p, name in decision.order if p == pool.name]
        # Admitted, so that the pool has a free place; the chosen node may have none.
        node = next((node for node in mine if node.in_flight < node.places), None)
        node = node or min(pool.nodes.values(), key=lambda n: n.in_flight - n.places)
        flight.node, flight.reason, flight.sent_s = node, decision.reason.value, now
        flight.concurrency = node.in_flight + 1
        view = next(p for p in snapshot.pools if p.name == pool.name)
        seen = next(n for n in view.nodes if n.name == node.name)
        predicted = snapshot.latency.predict(flight.view, view, seen, now)
        flight.predicted_ttft, flight.predicted_tpot = predicted.ttft_ms, predicted.tpot_ms
        node.enter(flight.view.slo.tpot_ms, now)
        self._latency.begin(pool.name, node.name, flight.view.id, self._due(flight))
        flight.snapshot = None
        self._prefill(flight, self._computer(flight, node))

    def _computer(self, flight: Flight, node: NodeState) -> Prefill | None:
        """What computes its prompt."""
        if node.engine.prefill is not None:
            flight.backlog = node.pending_tokens
            node.pending_tokens += flight.view.prompt_tokens
            return node.engine.prefill
        picture, name = self._picture, flight.line
        if name is None:
            return None
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
            flight.line = None
            self._its_turn(self._picture.lines[flight.prefill].release(flight.view.id, now))
            self._plan(flight.prefill)
            self._invite(flight.prefill)
        elif node.engine.prefill is not None:
            node.pending_tokens -= flight.view.prompt_tokens
            node.view = None
        if node.engine.cost.late and flight.prefill is not None:
            node = self._rebind(flight, node)
        self._loop.at(now + node.engine.start_s(flight.request), self._ready, flight)

    def _rebind(self, flight: Flight, old: NodeState) -> NodeState:
        """Where it decodes, chosen again from what is known now; it does not count against the node that it has."""
        pool, id, now, target = flight.pool, flight.view.id, self._loop.now, flight.view.slo.tpot_ms
        assert pool is not None
        old.leave(target, now)
        ready, request = old.coming.pop(id)
        self._latency.end(pool.name, old.name, id)
        decision = self._choose(flight, pool.name)
        flight.snapshot = None
        mine = [pool.nodes[name] for p, name in decision.order if p == pool.name]
        node = next((n for n in mine if n is old or n.in_flight < n.places), old)
        node.enter(target, now)
        node.coming[id] = (ready, request)
        flight.node, flight.concurrency = node, node.in_flight
        self._latency.begin(pool.name, node.name, id, self._due(flight))
        return node

    def _owed(self, flight: Flight) -> None:
        """From now on its first token is the node's business."""
        assert flight.node is not None
        ttft, wait = flight.predicted_ttft or 0.0, flight.predicted_wait or 0.0
        late = self._latency.latest_ms(flight.node.pool, ttft) - ttft
        due = max(self._due(flight), self._loop.now + (wait + late) / 1000)
        self._latency.begin(flight.node.pool, flight.node.name, flight.view.id, due)

    def _due(self, flight: Flight) -> float:
        """When its first token is due, by what was predicted."""
        assert flight.node is not None
        return flight.sent_s + self._latency.latest_ms(flight.node.pool, flight.predicted_ttft) / 1000

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
            self._heartbeat.rest(flight, node, tpot, now)
        node.leave(flight.view.slo.tpot_ms, now)
        ttft = (flight.first_s - request.at_s) * 1000
        self._latency.end(pool.name, node.name, flight.view.id)
        self._latency.observe(Sample(pool.name, node.name, now, output_tokens=request.output_tokens))
        self._latency.compare(pool.name, "tpot", flight.predicted_tpot, tpot)
        self._end(flight, "ok", None, ttft, tpot)
        self._admitted(pool.door.release(flight.view.id, now))

    def _end(
        self,
        flight: Flight,
        outcome: str,
        error: str | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> None:
        record = flight.record(self._model, outcome, error, ttft, tpot, self._loop.now)
        self._policy.observe(record)
        self._prefill_policy.observe(record)
        self._finished(Done(flight.request, record, flight.pool.cost if flight.pool else 0.0))
