"""One run: a fleet made of cost models, a policy, a workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from pdhub.api.policy import AdmissionOrder, Policy
from pdhub.config.build import Plan, needs_prefill
from pdhub.config.models import PoolConfig
from pdhub.config.seeds import latency_seeds
from pdhub.core.latency import LatencyModel
from pdhub.core.turns import Ahead
from pdhub.policies.compose import compose, compose_prefill
from pdhub.simulate.cost import Costs, DecodeCost, PrefillCost
from pdhub.simulate.engine import Node, Prefill
from pdhub.simulate.fleet import NodeState, Picture, PoolState
from pdhub.simulate.loop import Loop
from pdhub.simulate.oracle import Oracle, Scene
from pdhub.simulate.result import Done, PoolResult, Result, class_result, quantiles, series
from pdhub.simulate.router import Admission, Router
from pdhub.simulate.truth import Truth, factor
from pdhub.simulate.workload import Arrival, Class

DEFAULT_TPOT_MS = 20.0
"""Of a pool about which neither the costs file nor the configuration says anything."""


@dataclass(frozen=True, slots=True)
class World:
    """What every policy of a comparison meets.

    Args:
        plan: fleet, admission and the latency model's seeds. costs: of its pools; others are made from the seeds.
        seed: of everything that is drawn.
    """

    plan: Plan
    costs: Costs = field(default_factory=Costs)
    truth: Truth = field(default_factory=Truth)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy to compare.

    Args:
        make: a fresh one, which has learned nothing, for the scene that it will meet.
        plan: whose admission counts; None = the world's.
        plain: with bounded queues and nothing else: nobody spills, nobody is shed.
    """

    name: str
    make: Callable[[Scene], Policy]
    plan: Plan | None = None
    plain: bool = False


def oracle() -> Contender:
    return Contender("oracle", Oracle)


def of_plan(plan: Plan, name: str | None = None) -> Contender:
    """The policy that a configuration describes, composed as the router composes it."""
    return Contender(name or plan.routing.base.name, lambda scene: compose(plan), plan)


def simulate(world: World, contender: Contender, requests: Sequence[Arrival]) -> Result:
    """Every request from its arrival to its end; the same arguments give the same result."""
    loop = Loop()
    latency = LatencyModel(latency_seeds(world.plan.config))
    picture = _picture(world, loop, latency, contender.plan or world.plan)
    scene = Scene(loop, picture, {r.id: r for r in requests})
    done: list[Done] = []
    policy = contender.make(scene)
    prefill = compose_prefill(contender.plan or world.plan)
    if isinstance(policy, Oracle):
        prefill, picture.truth = policy.prefill, policy
    router = Router(
        loop,
        picture,
        policy,
        prefill,
        latency,
        _admission(contender.plan or world.plan, contender.plain),
        model=world.plan.config.model.name,
        finished=done.append,
        seed=world.seed,
    )
    source = iter(requests)

    def next_one(request: Arrival | None) -> None:
        if request is not None:
            router.arrive(request)
        following = next(source, None)
        if following is not None:
            loop.at(following.at_s, next_one, following)

    next_one(None)
    loop.run()
    if len(done) != len(requests):
        raise RuntimeError(f"{len(requests) - len(done)} requests never ended")
    return _result(contender.name, world, picture, latency, requests, done, loop.now)


def _admission(plan: Plan, plain: bool) -> Admission:
    config = plan.config.admission
    order = cast(AdmissionOrder, plan.order.spec.factory(plan.order.config))
    return Admission(order, config.default_budget_s, config.spill and not plain, config.shed and not plain)


def pool_cost(plan: Plan, pool: PoolConfig, costs: Costs) -> DecodeCost:
    """From the costs file, else what the configuration's seeds say."""
    found = costs.pool(pool.name)
    if found is not None:
        return found
    seed = pool.latency
    slots = getattr(plan.pools[pool.name].config, "slots", 1)
    slots = slots if isinstance(slots, int) and slots > 0 else 1
    tpot = seed.tpot_ms or DEFAULT_TPOT_MS
    points = {1: tpot, slots: tpot + (seed.tpot_ms_per_request or 0.0) * (slots - 1)}
    own = None
    if not needs_prefill(plan.pools[pool.name]):
        own = PrefillCost(ms=seed.ttft_ms or 0.0, ms_per_token=seed.ttft_ms_per_token or 0.05)
    return DecodeCost(slots=slots, tpot_ms=points, landings=pool.landings, prefill=own)


def prefill_cost(plan: Plan, costs: Costs) -> PrefillCost:
    """From the costs file, else the dearest that a pool's seeds say."""
    found = costs.prefill_cost()
    if found is not None:
        return found
    seeds = [pool.latency for pool in plan.config.pools]
    return PrefillCost(
        ms=max((s.ttft_ms or 0.0 for s in seeds), default=0.0),
        ms_per_token=max((s.ttft_ms_per_token or 0.0 for s in seeds), default=0.0) or 0.05,
    )


def _picture(world: World, loop: Loop, latency: LatencyModel, rules: Plan) -> Picture:
    plan, truth, seed = world.plan, world.truth, world.seed
    config = plan.config
    pools = []
    for pool in config.pools:
        cost = pool_cost(plan, pool, world.costs)
        nodes = [
            NodeState(Node(loop, n.name, cost, factor(truth, pool.name, n.name, seed)), pool.name, dict(n.labels))
            for n in pool.nodes
        ]
        state = PoolState(
            pool.name,
            nodes,
            models=frozenset({config.model.name}),
            cost=pool.cost,
            labels=dict(pool.labels),
            needs_prefill=cost.prefill is None,
            limit=config.admission.queue_limit,
        )
        pools.append(state)
    shared = prefill_cost(plan, world.costs)
    prefills = [Prefill(loop, p.name, shared, factor(truth, "prefill", p.name, seed)) for p in config.prefill]
    admission = rules.config.admission
    ahead = Ahead(admission.prefill_ahead_s, admission.prefill_ahead_tokens)
    return Picture(pools, prefills, latency, ahead)


def _result(
    name: str,
    world: World,
    picture: Picture,
    latency: LatencyModel,
    requests: Sequence[Arrival],
    done: Sequence[Done],
    end_s: float,
) -> Result:
    span = max(requests[-1].at_s - requests[0].at_s, 1e-9)
    total = class_result(done)
    by_class: dict[str, list[Done]] = {}
    by_pool: dict[str, list[Done]] = {}
    for d in done:
        by_class.setdefault(d.request.cls.name, []).append(d)
        if d.record.outcome == "ok" and d.record.pool is not None:
            by_pool.setdefault(d.record.pool, []).append(d)
    errors = latency.errors()
    pools = {}
    for pool in picture.pools.values():
        nodes = [node.engine for node in pool.nodes.values()]
        served = by_pool.get(pool.name, [])
        pools[pool.name] = PoolResult(
            requests=len(served),
            tokens=sum(d.record.completion_tokens for d in served),
            utilisation=sum(n.busy_s for n in nodes) / (len(nodes) * max(end_s, 1e-9)),
            slots=sum(n.slot_s for n in nodes) / (sum(n.cost.slots for n in nodes) * max(end_s, 1e-9)),
            calibration={metric: summary for (p, metric), summary in errors.items() if p == pool.name},
        )
    cost = sum(d.record.completion_tokens * d.price for d in done)
    curves = {}
    for cls, mine in by_class.items():
        ok = [d.record for d in mine if d.record.outcome == "ok"]
        curves[f"ttft {cls}"] = quantiles(r.ttft_ms for r in ok)
        curves[f"tpot {cls}"] = quantiles(r.tpot_ms for r in ok)
    prefills = list(picture.prefills.values())
    return Result(
        policy=name,
        seed=world.seed,
        span_s=span,
        offered=len(requests) / span,
        goodput=total.good / span,
        total=total,
        classes={cls: class_result(mine) for cls, mine in sorted(by_class.items())},
        pools=pools,
        prefill_utilisation=sum(p.busy_s for p in prefills) / (len(prefills) * max(end_s, 1e-9)) if prefills else 0.0,
        cost=cost,
        cost_per_good=cost / total.good if total.good else None,
        reasons=dict(Counter(d.record.reason or d.record.error_code or "?" for d in done).most_common()),
        targets={d.request.cls.name: _targets(d.request.cls) for d in done},
        curves=curves,
        series=series(done, span),
    )


def _targets(cls: Class) -> dict[str, float]:
    both = {"ttft": cls.ttft_ms, "tpot": cls.tpot_ms}
    return {metric: target for metric, target in both.items() if target is not None}
