"""Small fleets for tests of policies."""

import random

from pdhub.api import SLO, Capabilities, EngineLoad, Feature, NodeView, PoolView, Prediction, RequestView, Snapshot
from pdhub.testing.policy_kit import FixedLatency

NOW = 1000.0


def node(name, pool, in_flight=0, **members):
    return NodeView(name, pool, in_flight=in_flight, **members)


def fleet(*nodes, costs=None, slots=4, latency=None, features=frozenset(Feature), role="decode", labels=None):
    """Nodes in their pools. ``latency``: pool or node name → (TTFT, TPOT) in milliseconds."""
    pools = {}
    for n in nodes:
        pools.setdefault(n.pool, []).append(n)
    owner = {n.name: n.pool for n in nodes}
    known = {
        (owner[name], name) if name in owner else name: Prediction(ttft, tpot, 0.0)
        for name, (ttft, tpot) in (latency or {}).items()
    }
    views = tuple(
        PoolView(
            name=name,
            models=frozenset({"m"}),
            capabilities=Capabilities(features, 100_000, 20, slots * len(members)),
            nodes=tuple(members),
            role=role,
            cost=(costs or {}).get(name, 1.0),
            labels=(labels or {}).get(name, {}),
        )
        for name, members in pools.items()
    )
    return Snapshot(1, views, FixedLatency(known))


def asked(ttft=None, tpot=None, id="r", waited_ms=0.0, **members):
    return RequestView(
        id, "m", "/v1/completions", members.pop("prompt_tokens", 100), slo=SLO(ttft_ms=ttft, tpot_ms=tpot),
        arrived_s=NOW - waited_ms / 1000, **members,
    )  # fmt: skip


def ask(policy, snapshot, request=None, **members):
    return policy.choose(request or asked(**members), snapshot, NOW, random.Random(0))


def busy(running=0, waiting=0):
    return EngineLoad(running=running, waiting=waiting)
