"""``pdhub explain``: a decision without a fleet, on nodes made from the configuration, healthy and idle unless told
otherwise."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pdhub.api.client import EngineClient, LegOrder
from pdhub.api.engine import Capabilities
from pdhub.api.errors import ConfigError
from pdhub.api.plugin import EngineSpec
from pdhub.api.policy import Decision, Health, NodeView, PoolView, Snapshot
from pdhub.api.request import RequestView
from pdhub.config.build import Plan, Resolved
from pdhub.config.explain import nearest
from pdhub.config.models import PoolConfig
from pdhub.config.parsing import parser_features, splits_reasoning
from pdhub.config.seeds import latency_seeds
from pdhub.core.latency import PREFILL, LatencyModel
from pdhub.core.slo import SloReading
from pdhub.router.clients.node import NodeClient
from pdhub.router.explain import Explanation, Handoff, World, explain
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
    return explain(_Offline(plan, wall_s, states), raw, headers, id=id)


class _Offline(World):
    defaults: Mapping[str, float] = {}
    now = NOW

    def __init__(self, plan: Plan, wall_s: float | None, states: Sequence[str]) -> None:
        self._clients = {name: _client(engine) for name, engine in plan.pools.items()}
        self._assumed: list[str] = []
        pools = tuple(self._pool(plan, pool) for pool in plan.config.pools)
        prefills = tuple(NodeView(p.name, PREFILL, labels=p.labels) for p in plan.config.prefill)
        self._prefills = PoolView(
            PREFILL, frozenset({plan.config.model.name}), EVERYTHING, prefills, role="prefill", needs_prefill=False
        )
        for state in states:
            *decode, self._prefills = _with((*pools, self._prefills), state)
            pools = tuple(decode)
        self._snapshot = Snapshot(1, pools, LatencyModel(latency_seeds(plan.config)).freeze(NOW))
        self.model, self.reasons = plan.config.model, splits_reasoning(plan)
        self.rules = rulebook(plan)
        self.wall_s = time.time() if wall_s is None else wall_s
        self.rng = random.Random(0)
        if not states:
            self._assumed.append("every node is ready and idle")
        self._assumed.append("latencies are the configuration's seeds; a running router has measured them")
        if prefills:
            self._assumed.append("the model sets no sampling values of its own")
        self.assumed = self._assumed

    def capabilities(self) -> list[Capabilities]:
        return [pool.capabilities for pool in self._snapshot.pools]

    def snapshot(self, request: RequestView, asked: SloReading) -> Snapshot:
        return self._snapshot

    def door(self, decision: Decision) -> None:
        return None

    def handoff(self, request: RequestView, pool: str, node: str) -> Handoff | None:
        client = self._clients[pool]
        if client.order is LegOrder.DECODE_ONLY:
            return None
        instances = replace(self._snapshot, pools=(self._prefills,))
        decision = self.rules.prefill.choose(request, instances, NOW, self.rng)
        return Handoff(client.bind, decision.node, decision.reason.value)

    def _pool(self, plan: Plan, pool: PoolConfig) -> PoolView:
        engine = plan.pools[pool.name]
        declared = EVERYTHING if engine.spec.declares is None else engine.spec.declares(engine.config)
        if self._clients[pool.name].speaks_tokens:
            declared = replace(declared, features=declared.features | parser_features(plan))
        if engine.spec.declares is None:
            what = f"pool '{pool.name}' can do everything: engine '{engine.spec.name}' declares nothing offline"
            self._assumed.append(what)
        slots = max(1, declared.slots)
        return PoolView(
            name=pool.name,
            models=frozenset({plan.config.model.name}),
            capabilities=replace(declared, slots=slots * len(pool.nodes)),
            nodes=tuple(NodeView(node.name, pool.name, labels=node.labels, slots=slots) for node in pool.nodes),
            cost=pool.cost,
            needs_prefill=self._clients[pool.name].order is not LegOrder.DECODE_ONLY,
            labels=pool.labels,
        )


def _client(engine: Resolved[EngineSpec]) -> EngineClient:
    return NodeClient() if engine.spec.client is None else engine.spec.client(engine.config)


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
