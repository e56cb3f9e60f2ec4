"""A policy that knows what no router can: every answer's length, and how fast every engine really is, now.

It does not know the future: requests that have not come yet. So it is a strong yardstick, not a bound.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdhub.api.policy import Candidate, Decision, NodeView, Policy, PoolView, Prediction, Reason, Snapshot
from pdhub.api.request import RequestView
from pdhub.core.latency import PREFILL
from pdhub.policies.capable import sift
from pdhub.simulate.cost import DecodeCost
from pdhub.simulate.engine import Node
from pdhub.simulate.fleet import NodeState, Picture
from pdhub.simulate.loop import Loop
from pdhub.simulate.workload import Arrival

MARGIN = 0.98
"""Share of a target that may be used up: the look ahead is nearly exact, not exact."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What the request would see on a node, and how many others would miss because of it."""

    ttft_ms: float
    tpot_ms: float
    spoilt: int


@dataclass(frozen=True, slots=True)
class Scene:
    """A run's parts before it runs: what nobody but an all-knowing policy may look at."""

    loop: Loop
    picture: Picture
    requests: Mapping[str, Arrival]

    def computed_s(self, instance: str, mine: Arrival) -> float:
        """True time at which a prefill instance would have computed the prompt, after those in its line whose turn
        comes before."""
        prefill, line, weighed = self.picture.prefills[instance], self.picture.lines[instance], self.picture.weighed
        before = line.before(weighed) if weighed is not None else ()
        return prefill.ready_s(mine) + sum(prefill.alone_s(self.requests[ticket.id]) for ticket in before)


class Oracle(Policy):
    """The cheapest pool, and there the fullest node, on which the request attains and nobody else is spoilt. A request
    for which there is none goes where it costs the fewest others their targets."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.prefill = Soonest(scene)
        self._fates: dict[tuple[str, str], Fate] = {}
        self._fates_s = -1.0

    def predict(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> Prediction:
        """The truth, for whoever asks a latency model."""
        fate = self._fate_at(request, pool.name, node.name, now)
        door = self._scene.picture.pools[pool.name].door
        wait = (door.predicted_wait(now, node.queued) or 0.0) * 1000 if node.queued else 0.0
        return Prediction(fate.ttft_ms + wait, fate.tpot_ms, wait)

    def choose(self, request: RequestView, snapshot: Snapshot, now: float, rng: random.Random) -> Decision:
        kept, dropped, nobody = sift(request, snapshot.pools)
        if not kept:
            return Decision((), tuple(dropped), nobody, "oracle")
        waited = (now - request.arrived_s) * 1000
        one_token = self._scene.requests[request.id].output_tokens == 1
        pools = self._scene.picture.pools
        free = {n.pool for _, v in kept if (n := pools[v.pool].nodes[v.name]).in_flight < n.places}
        rows: list[tuple[tuple[float, ...], str, str]] = []
        for pool, node in kept:
            seen = self.predict(request, pool, node, now)
            fate = self._fate_at(request, pool.name, node.name, now)
            state = self._scene.picture.pools[pool.name].nodes[node.name]
            ttft, tpot = request.slo.ttft_ms, request.slo.tpot_ms
            miss = max(
                (waited + (seen.ttft_ms or 0.0)) / ttft if ttft is not None else 0.0,
                fate.tpot_ms / tpot if tpot is not None and not one_token else 0.0,
            )
            # Where every node is full it would wait at the door; else the full ones are out.
            full = state.in_flight >= state.places and pool.name in free
            rows.append((_key(miss, fate, pool, node, full), pool.name, node.name))
        rows.sort()
        if rows[0][0][1] > 0 and request.priority < 0:  # it would cost more than it is worth
            shed = [Candidate(p.name, n.name, dropped_by="oracle") for p, n in kept]
            return Decision((), (*shed, *dropped), Reason.SHED, "oracle")
        order = tuple((pool, node) for _, pool, node in rows)
        kept_candidates = tuple(Candidate(p, n) for p, n in order)
        reason = Reason.SLO_MET if rows[0][0][0] == 0 else Reason.SLO_LEAST_MISS
        return Decision(order, (*kept_candidates, *dropped), reason, "oracle")

    def _fate_at(self, request: RequestView, pool: str, node: str, now: float) -> Fate:
        if now != self._fates_s:
            self._fates.clear()
            self._fates_s = now
        state = self._scene.picture.pools[pool].nodes[node]
        key = request.id, node
        if key not in self._fates:
            self._fates[key] = self._fate(self._scene.requests[request.id], state, now)
        return self._fates[key]

    def _fate(self, mine: Arrival, state: NodeState, now: float) -> Fate:
        engine = state.engine
        if engine.prefill is not None:
            computed_s = engine.prefill.ready_s(mine)
        else:
            computed_s = min((self._scene.computed_s(name, mine) for name in self._scene.picture.prefills), default=now)
        coming = sorted(state.coming.values(), key=lambda entry: entry[0])
        return look_ahead(engine, coming, mine, computed_s + engine.start_s(mine), now)


class Soonest(Policy):
    """The prefill instance that will have computed the prompt first."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def choose(self, request: RequestView, snapshot: Snapshot, now: float, rng: random.Random) -> Decision:
        mine, prefills = self._scene.requests[request.id], self._scene.picture.prefills
        order = sorted(prefills, key=lambda name: (self._scene.computed_s(name, mine), name))
        found = tuple((PREFILL, name) for name in order)
        return Decision(found, tuple(Candidate(*key) for key in found), Reason.LEAST_LOADED, "oracle")


def _key(miss: float, fate: Fate, pool: PoolView, node: NodeView, full: bool) -> tuple[float, ...]:
    attains = miss <= MARGIN and not full
    if attains and not fate.spoilt:
        return (0.0, 0.0, pool.cost, -node.in_flight, miss)
    return (1.0, float(fate.spoilt - attains), pool.cost, node.in_flight, miss)


def look_ahead(
    engine: Node, coming: Iterable[tuple[float, Arrival]], mine: Arrival, ready_s: float, now: float
) -> Fate:
    """Play the node's future until ``mine`` is done, without requests that nobody sent yet.

    Args:
        coming: when each request that was sent to it will be ready, earliest first.
        ready_s: when mine would be.
    """
    slots, cost = engine.cost.slots, engine.cost
    later = deque(sorted([*((max(at, now), r) for at, r in coming), (ready_s, mine)], key=lambda entry: entry[0]))
    # End in steps (tokens of a request of normal speed), a number for ties, when it began (ms from now), the request.
    heap = [(engine.left(run), run.number, (run.start_s - now) * 1000, run.request) for run in engine.running]
    heapq.heapify(heap)
    context = engine.context
    queue = deque(engine.waiting)
    time_ms = steps = delayed_ms = 0.0
    number, spoilt = 1 << 40, 0
    begun: float | None = None
    while True:
        while later and (later[0][0] - now) * 1000 <= time_ms:
            queue.append(later.popleft()[1])
        while queue and len(heap) < slots:
            request = queue.popleft()
            number += 1
            heapq.heappush(heap, (steps + (request.output_tokens - 1) * engine.slow(request), number, time_ms, request))
            context += request.prompt_tokens + request.output_tokens / 2
            if request is mine:
                begun = time_ms
        if not heap:
            time_ms = (later[0][0] - now) * 1000
            continue
        count = len(heap)
        speed = engine.factor_at(now + time_ms / 1000)
        token = cost.token_ms(count, context / count) * speed
        gap = max(0.0, heap[0][0] - steps) * token
        if later and (next_ms := (later[0][0] - now) * 1000) < time_ms + gap:
            gap = next_ms - time_ms
            delayed_ms += _delay(gap, cost, count, context, begun)
            steps += gap / token
            time_ms = next_ms
            continue
        delayed_ms += _delay(gap, cost, count, context, begun)
        time_ms += gap
        steps, _, start_ms, request = heapq.heappop(heap)
        context -= request.prompt_tokens + request.output_tokens / 2
        if request is mine:
            break
        spoilt += _spoilt(request, time_ms - start_ms, delayed_ms)
    assert begun is not None
    if heap:
        token = cost.token_ms(len(heap), context / len(heap)) * engine.factor_at(now + time_ms / 1000)
        for end, _, start_ms, request in heap:
            spoilt += _spoilt(request, time_ms + (end - steps) * token - start_ms, delayed_ms)
    tokens = mine.output_tokens - 1
    return Fate(begun, (time_ms - begun) / tokens if tokens else 0.0, spoilt)


def _delay(gap_ms: float, cost: DecodeCost, count: int, context: float, begun: float | None) -> float:
    """How much of a gap is there because mine runs too."""
    if begun is None or count < 2:
        return 0.0
    mean = context / count
    return gap_ms * (1 - cost.token_ms(count - 1, mean) / cost.token_ms(count, mean))


def _spoilt(request: Arrival, took_ms: float, delayed_ms: float) -> bool:
    """The delay costs it the safe side of its TPOT target, and it would not miss the target anyway."""
    target, tokens = request.cls.tpot_ms, request.output_tokens - 1
    if target is None or not tokens or not delayed_ms:
        return False
    return took_ms - delayed_ms <= target * tokens and took_ms > target * tokens * MARGIN
