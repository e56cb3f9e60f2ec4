"""Whatever the rules say, a decision accounts for every node once, and depends on nothing but its inputs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import (
    SLO,
    Capabilities,
    Feature,
    Health,
    NodeView,
    PolicySpec,
    PoolView,
    Prediction,
    Reason,
    RequestView,
    Snapshot,
)
from pdhub.policies.capable import sift
from pdhub.policies.compose import Composed
from pdhub.policies.instances import Instances
from pdhub.policies.match import Match, Range
from pdhub.policies.plugin import pdhub_register_policies
from pdhub.policies.routing import Part, Routing, Rule

SPECS = {(spec.part.value, spec.name): spec for spec in pdhub_register_policies()}
POOLS = ("a", "b", "c")


def part(kind: str, name: str, **options: Any) -> Part:
    spec: PolicySpec = SPECS[kind, name]
    soft = options.pop("soft", False)
    weight = options.pop("weight", 1.0)
    return Part(name, spec, spec.config.model_validate(options), weight, soft)


class Guess:
    """Some nodes are predicted, some are not."""

    def predict(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> Prediction:
        return Prediction(10.0 * node.in_flight, 5.0 * node.in_flight, 0.0) if node.queued else Prediction()


FILTERS = st.sampled_from(
    [
        part("filter", "slo_headroom", soft=True),
        part("filter", "slo_headroom"),
        part("filter", "label", match={"zone": "x"}),
        part("filter", "label", match={"zone": "x"}, soft=True),
        part("filter", "health"),
    ]
)
SCORERS = st.sampled_from(
    [
        part("scorer", "load"),
        part("scorer", "headroom", weight=2.0),
        part("scorer", "cost"),
        part("scorer", "load", weight=0.0),
    ]
)
BASES = st.sampled_from(
    [part("policy", "slo"), part("policy", "round_robin"), part("policy", "power_of_two"), part("policy", "weighted")]
)
SOME_POOLS = st.lists(st.sampled_from(POOLS), unique=True, max_size=3).map(tuple)
MATCHES = st.builds(
    Match,
    tenants=st.sampled_from([(), ("t*",), ("other",)]),
    tpot_ms=st.sampled_from([None, Range(None, 20), Range(20, None)]),
    has_slo=st.sampled_from([None, True, False]),
)


@st.composite
def rules(draw: st.DrawFn, name: str) -> Rule:
    weights = draw(st.dictionaries(st.sampled_from(POOLS), st.floats(0, 5), max_size=3))
    drawn = draw(st.booleans()) and sum(weights.values()) > 0
    return Rule(
        name=name,
        match=draw(MATCHES),
        pools=() if drawn else draw(SOME_POOLS),
        weights=tuple(sorted(weights.items())) if drawn else (),
        sticky=draw(st.sampled_from(["request", "session", "tenant"])),
        filters=tuple(draw(st.lists(FILTERS, max_size=2))),
        scorers=() if drawn else tuple(draw(st.lists(SCORERS, max_size=2))),
        fallback=draw(st.none() | SOME_POOLS),
    )


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    return Routing(
        base=draw(BASES),
        filters=tuple(draw(st.lists(FILTERS, max_size=2))),
        scorers=tuple(draw(st.lists(SCORERS, max_size=2))),
        rules=tuple(draw(rules(f"rule-{n}")) for n in range(draw(st.integers(0, 3)))),
        fallback=draw(SOME_POOLS),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    pools = []
    for name in draw(SOME_POOLS):
        nodes = tuple(
            NodeView(
                f"{name}-{n}",
                name,
                health=draw(st.sampled_from([Health.READY, Health.READY, Health.READY, Health.DOWN])),
                in_flight=draw(st.integers(0, 5)),
                queued=draw(st.integers(0, 1)),
                labels=draw(st.sampled_from([{}, {"zone": "x"}])),
            )
            for n in range(draw(st.integers(1, 3)))
        )
        features = draw(st.sampled_from([frozenset[Feature](), frozenset({Feature.SEED})]))
        pools.append(PoolView(name, frozenset({"m"}), Capabilities(features, 4096, 0, 4), nodes, cost=len(pools)))
    return Snapshot(1, tuple(pools), Guess())


REQUESTS = st.builds(
    RequestView,
    id=st.text("abc", min_size=1, max_size=4),
    model=st.just("m"),
    endpoint=st.just("/v1/completions"),
    prompt_tokens=st.sampled_from([10, 9999]),
    features=st.sampled_from([frozenset[Feature](), frozenset({Feature.SEED})]),
    slo=st.builds(SLO, tpot_ms=st.sampled_from([None, 10.0, 100.0]), ttft_ms=st.sampled_from([None, 20.0])),
    tenant=st.sampled_from(["t1", "other", "x"]),
    session=st.sampled_from(["", "s"]),
    priority=st.integers(-1, 1),
)


@settings(max_examples=60, deadline=None)
@given(routings(), snapshots(), REQUESTS)
def test_decisions_account_for_everything(routing: Routing, snapshot: Snapshot, request: RequestView) -> None:
    policy = Composed(routing, Instances())
    decision = policy.choose(request, snapshot, 100.0, random.Random(1))

    every = sorted((p.name, n.name) for p in snapshot.pools for n in p.nodes)
    assert sorted((c.pool, c.node) for c in decision.candidates) == every
    kept = {(c.pool, c.node) for c in decision.candidates if c.kept}
    assert set(decision.order) <= kept
    assert len(set(decision.order)) == len(decision.order)
    assert all(c.why for c in decision.candidates if not c.kept)

    able = {(p.name, n.name) for p, n in sift(request, snapshot.pools)[0]}
    assert kept <= able
    refused = (Reason.FILTERED, Reason.NO_CAPABLE_POOL, Reason.NO_HEALTHY_NODE, Reason.SHED)
    assert (decision.reason in refused) is not bool(decision.order)
    if decision.reason is Reason.SHED:
        assert request.priority < 0

    again = policy.choose(request, snapshot, 100.0, random.Random(1))
    assert again == decision
    turned = replace(snapshot, pools=tuple(replace(p, nodes=p.nodes[::-1]) for p in reversed(snapshot.pools)))
    other = policy.choose(request, turned, 100.0, random.Random(1))
    assert (other.order, other.reason, other.rule) == (decision.order, decision.reason, decision.rule)
    assert list(other.candidates) == list(decision.candidates)
