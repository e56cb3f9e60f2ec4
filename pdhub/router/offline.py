"""A decision without a fleet: nodes made from the configuration, healthy and idle unless told otherwise."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pdhub.api.engine import Capabilities
from pdhub.api.errors import ConfigError
from pdhub.api.plugin import EngineSpec
from pdhub.api.policy import Health, NodeView, PoolView, Snapshot
from pdhub.config.build import Plan, Resolved, needs_prefill
from pdhub.config.explain import nearest
from pdhub.config.models import PoolConfig
from pdhub.config.seeds import latency_seeds
from pdhub.core.latency import LatencyModel
from pdhub.router.explain import Explanation, World, explain
from pdhub.router.fleet import EVERYTHING
from pdhub.router.rulebook import rulebook

NOW = 1_000_000.0
"""Any moment: the same question has the same answer."""

ID = "explain"
"""A request's id when none is given."""


def explain_offline(
    plan: Plan,
    raw: bytes,
    headers: Mapping[str, str],
    *,
    wall_s: float | None = None,
    states: Sequence[str] = (),
    id: str = ID,
) -> Explanation:
    """Decide for one request as a router would that has seen nothing yet.

    Args:
        raw: the body. headers: lower-cased names.
        wall_s: epoch seconds, for rules with a time window; None = now.
        states: ``NODE=STATE`` each: a health, or a number of requests that run there.

    Raises:
        ConfigError: a state that means nothing. InvalidRequest: the router would refuse the request.
    """
    assumed: list[str] = []
    pools = tuple(_pool(plan, pool, assumed) for pool in plan.config.pools)
    for state in states:
        pools = _with(pools, state)
    if not states:
        assumed.append("every node is ready and idle")
    assumed.append("latencies are the configuration's seeds; a running router has measured them")
    if plan.prefill:
        assumed.append("the model sets no sampling values of its own")
    world = World(
        model=plan.config.model,
        rules=rulebook(plan),
        snapshot=Snapshot(1, pools, LatencyModel(latency_seeds(plan.config)).freeze(NOW)),
        pools=[pool.capabilities for pool in pools],
        defaults={},
        now=NOW,
        wall_s=time.time() if wall_s is None else wall_s,
        rng=random.Random(0),
    )
    return explain(world, raw, headers, id=id, assumed=assumed)


def _pool(plan: Plan, pool: PoolConfig, assumed: list[str]) -> PoolView:
    engine = plan.pools[pool.name]
    declared = _declared(engine)
    if declared is None:
        assumed.append(f"pool '{pool.name}' can do everything: engine '{engine.spec.name}' declares nothing offline")
        declared = EVERYTHING
    slots = max(1, declared.slots)
    return PoolView(
        name=pool.name,
        models=frozenset({plan.config.model.name}),
        capabilities=replace(declared, slots=slots * len(pool.nodes)),
        nodes=tuple(NodeView(node.name, pool.name, labels=node.labels, slots=slots) for node in pool.nodes),
        cost=pool.cost,
        needs_prefill=needs_prefill(engine),
        labels=pool.labels,
    )


def _declared(engine: Resolved[EngineSpec]) -> Capabilities | None:
    return None if engine.spec.declares is None else engine.spec.declares(engine.config)


def _with(pools: tuple[PoolView, ...], state: str) -> tuple[PoolView, ...]:
    name, _, word = state.partition("=")
    known = [node.name for pool in pools for node in pool.nodes]
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean '{near}'?" if near else f"the nodes are: {', '.join(known)}"
        raise ConfigError(f"there is no node '{name}'", hint=hint)

    def changed(node: NodeView) -> NodeView:
        if node.name != name:
            return node
        if word.isascii() and word.isdigit():
            return replace(node, in_flight=int(word[:9]))
        try:
            return replace(node, health=Health(word))
        except ValueError:
            hint = f"give a number of requests, or one of {', '.join(Health)}"
            raise ConfigError(f"'{word}' is no state of a node", hint=hint) from None

    return tuple(replace(pool, nodes=tuple(changed(node) for node in pool.nodes)) for pool in pools)
