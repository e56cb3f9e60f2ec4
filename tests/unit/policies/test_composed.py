"""Rules, filters, scorers, reserve and shadow around a base policy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pdhub.api import (
    SLO,
    Decision,
    Feature,
    Filter,
    Health,
    NodeView,
    PolicyPart,
    PolicySpec,
    PoolView,
    Prediction,
    Reason,
    RequestRecord,
    RequestView,
    Scorer,
    Snapshot,
    hookimpl,
)
from pdhub.api.plugin import NoConfig, PluginConfig
from pdhub.config.build import build_plan
from pdhub.config.models import Config
from pdhub.policies.compose import Composed, compose
from pdhub.registry import load
from pdhub.testing import toy
from pdhub.testing.hub import toy_topology
from pdhub.testing.policy_kit import MODEL, PolicyConformance, make_pool


class NamesConfig(PluginConfig):
    """Node names."""

    names: tuple[str, ...] = ()


class Drop(Filter):
    def __init__(self, config: NamesConfig) -> None:
        self._names = config.names

    def drop(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> str | None:
        return "it is on the list" if node.name in self._names else None


class Like(Scorer):
    """1 for the named nodes; remembers what it observed."""

    seen = 0

    def __init__(self, config: NamesConfig) -> None:
        self._names = config.names

    def score(self, request: RequestView, nodes: Sequence[tuple[PoolView, NodeView]], now: float) -> Sequence[float]:
        return [float(node.name in self._names) for _, node in nodes]

    def observe(self, record: RequestRecord) -> None:
        Like.seen += 1


class Junk(Scorer):
    def __init__(self, config: NoConfig) -> None:
        pass

    def score(self, request: RequestView, nodes: Sequence[tuple[PoolView, NodeView]], now: float) -> Sequence[float]:
        return [(float("nan"), float("inf"), -5.0, 7.0)[int(node.name[-1]) % 4] for _, node in nodes]


class Parts:
    @hookimpl
    def pdhub_register_policies(self) -> list[PolicySpec]:
        def spec(name: str, part: PolicyPart, factory: Any, config: Any = NamesConfig) -> PolicySpec:
            return PolicySpec(name=name, summary=name, part=part, factory=factory, config=config)

        return [
            spec("drop", PolicyPart.FILTER, Drop),
            spec("like", PolicyPart.SCORER, Like),
            spec("junk", PolicyPart.SCORER, Junk, NoConfig),
        ]


REGISTRY = load(extra=[toy, Parts()])
POOLS = ("fast", "general", "spare")
EVERYTHING = frozenset(Feature)


def composed(base: str = "slo_threshold", **policy: Any) -> Composed:
    """A policy over three pools; the base sends everything to ``general``, tight targets to ``fast``."""
    topology = toy_topology()
    topology["pools"].append({**topology["pools"][0], "name": "spare", "nodes": [{"name": "spare-0", "port": 0}]})
    options = {"tpot_below_ms": 20, "fast": "fast", "otherwise": "general"} if base == "slo_threshold" else {}
    topology["policy"] = {"type": base, "config": options, **policy}
    return compose(build_plan(Config.model_validate(topology), REGISTRY))


def fleet(nodes: int = 2, **pools: frozenset[Feature]) -> Snapshot:
    return Snapshot(1, tuple(make_pool(n, nodes, features=pools.get(n, EVERYTHING), context=100_000) for n in POOLS))


def request(**values: Any) -> RequestView:
    return RequestView(**{"id": "r", "model": MODEL, "endpoint": "/v1/completions", "prompt_tokens": 10, **values})


def ask(policy: Composed, snapshot: Snapshot | None = None, **values: Any) -> Decision:
    return policy.choose(request(**values), snapshot or fleet(), 100.0, random.Random(0))


def pools_of(decision: Decision) -> list[str]:
    return list(dict.fromkeys(pool for pool, _ in decision.order))


def rule(name: str = "r", **values: Any) -> dict[str, Any]:
    return {"name": name, **values}


def sick(snapshot: Snapshot, *pools: str) -> Snapshot:
    return replace(snapshot, pools=tuple(
        replace(p, nodes=tuple(replace(n, health=Health.DOWN) for n in p.nodes)) if p.name in pools else p
        for p in snapshot.pools
    ))  # fmt: skip


def test_without_anything_around_it_the_base_decides():
    decision = ask(composed())
    assert (decision.pool, decision.reason, decision.policy, decision.rule) == (
        "general", Reason.NO_SLO, "slo_threshold", None,
    )  # fmt: skip


def test_pools_in_order_then_the_others():
    decision = ask(composed(rules=[rule(pools=["spare", "fast"])]))
    assert pools_of(decision) == ["spare", "fast", "general"]
    assert (decision.reason, decision.rule) == (Reason.RULE, "r")
    assert {c.dropped_by for c in decision.candidates} == {None}


def test_the_first_matching_rule_counts():
    policy = composed(
        rules=[
            rule("a", match={"tenant": ["a*"]}, pools=["fast"]),
            rule("b", match={"prompt_tokens": {"at_least": 100}}, pools=["spare"]),
        ]
    )
    assert ask(policy, tenant="acme", prompt_tokens=500).rule == "a"
    assert ask(policy, tenant="x", prompt_tokens=500).rule == "b"
    assert ask(policy, tenant="x").rule is None


def test_a_rule_that_cannot_be_followed_falls_back():
    policy = composed(rules=[rule(pools=["fast"])])
    decision = ask(policy, sick(fleet(), "fast"))
    assert (decision.pool, decision.reason, decision.rule) == ("general", Reason.FALLBACK, "r")
    decision = ask(policy, fleet(fast=frozenset()), features=frozenset({Feature.SEED}))
    assert (decision.pool, decision.reason) == ("general", Reason.FALLBACK)


def test_a_rule_may_name_its_fallback():
    decision = ask(composed(rules=[rule(pools=["fast"], fallback=["spare"])]))
    assert pools_of(decision) == ["fast", "spare"]
    left_out = {(c.pool, c.dropped_by) for c in decision.candidates if not c.kept}
    assert left_out == {("general", "rule")}
    assert len(decision.candidates) == 6


def test_a_rule_without_fallback_rather_refuses():
    policy = composed(rules=[rule(pools=["fast"], fallback=[])])
    assert ask(policy, sick(fleet(), "fast")).reason is Reason.NO_HEALTHY_NODE
    incapable = ask(policy, fleet(fast=frozenset()), features=frozenset({Feature.SEED}))
    assert (incapable.order, incapable.reason) == ((), Reason.NO_CAPABLE_POOL)
    assert "cannot do seed" in {c.why for c in incapable.candidates}


def test_filters_drop_with_a_reason():
    policy = composed(filters=[{"type": "drop", "name": "mine", "config": {"names": ["general-0"]}}])
    decision = ask(policy)
    assert decision.order[0] == ("general", "general-1")
    dropped = [c for c in decision.candidates if not c.kept]
    assert [(c.node, c.dropped_by, c.why) for c in dropped] == [("general-0", "mine", "it is on the list")]
    assert decision.reason is Reason.NO_SLO


def test_filters_that_leave_nobody_say_so_and_soft_ones_give_way():
    everybody = [f"{p}-{n}" for p in POOLS for n in range(2)]
    hard = ask(composed(filters=[{"type": "drop", "config": {"names": everybody}}]))
    assert (hard.order, hard.reason) == ((), Reason.FILTERED)
    soft = ask(composed(filters=[{"type": "drop", "soft": True, "config": {"names": everybody}}]))
    assert soft.pool == "general"
    assert all(c.kept for c in soft.candidates)
    # Sick nodes are no reason to hold on to: the filter would leave none of the well ones.
    left = [n for n in everybody if not n.startswith("spare")]
    policy = composed(filters=[{"type": "drop", "soft": True, "config": {"names": left}}])
    assert ask(policy, sick(fleet(), "spare")).pool == "general"


def test_a_rules_filters_come_on_top():
    policy = composed(
        filters=[{"type": "drop", "config": {"names": ["general-0"]}}],
        rules=[rule(match={"has_slo": True}, filters=[{"type": "drop", "config": {"names": ["general-1", "fast-0"]}}])],
    )
    assert ask(policy).order[0] == ("general", "general-1")
    tight = ask(policy, slo=SLO(tpot_ms=500))
    assert (tight.pool, tight.rule, tight.reason) == ("fast", "r", Reason.FALLBACK)


def test_a_scored_set_ranks_all_nodes_of_its_pools_together():
    likes = [{"type": "like", "config": {"names": ["spare-1", "fast-0"]}}]
    decision = ask(composed(rules=[rule(pools=["fast", "spare"], scorers=likes)]))
    assert {node for _, node in decision.order[:2]} == {"spare-1", "fast-0"}
    assert pools_of(decision)[-1] == "general"
    assert decision.reason is Reason.RULE
    scores = {c.node: c.scores for c in decision.candidates}
    assert scores["spare-1"] == {"like": 1.0}
    assert scores["spare-0"] == {"like": 0.0}


def test_weights_of_scorers():
    def first(weight: float) -> str:
        return ask(composed(rules=[rule(scorers=[
            {"type": "like", "name": "a", "weight": weight, "config": {"names": ["fast-0"]}},
            {"type": "like", "name": "b", "config": {"names": ["spare-0"]}},
        ])])).order[0][1]  # fmt: skip

    assert (first(2), first(0.5)) == ("fast-0", "spare-0")


def test_a_bad_scorer_spoils_nothing():
    likes = {"type": "like", "config": {"names": ["spare-1"]}, "weight": 3}
    decision = ask(composed(rules=[rule(scorers=[{"type": "junk"}, likes])]))
    assert decision.order[0] == ("spare", "spare-1")
    assert all(0 <= s <= 1 for c in decision.candidates for s in c.scores.values())


def test_ties_do_not_send_everybody_to_one_node():
    policy = composed(rules=[rule(scorers=[{"type": "like"}])])
    firsts = Counter(ask(policy, id=f"r{n}").order[0] for n in range(600))
    assert len(firsts) == 6
    assert max(firsts.values()) < 180


def test_the_policys_scorers_rank_inside_the_pools_that_the_base_ordered():
    policy = composed(scorers=[{"type": "like", "config": {"names": ["general-1", "spare-1"]}}])
    decision = ask(policy)
    assert pools_of(decision)[0] == "general"
    assert decision.order[0] == ("general", "general-1")
    candidate = next(c for c in decision.candidates if c.node == "general-1")
    assert candidate.scores["like"] == 1.0
    assert "in_flight" in candidate.scores


class Slow:
    """Predicts a miss for one node."""

    def predict(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> Prediction:
        return Prediction(ttft_ms=10.0, tpot_ms=999.0 if node.name == "general-1" else 10.0)


def test_a_liked_node_that_would_miss_stays_behind():
    policy = composed(scorers=[{"type": "like", "config": {"names": ["general-1"]}}])
    snapshot = replace(fleet(), latency=Slow())
    assert ask(policy, snapshot, slo=SLO(tpot_ms=100)).order[:2] == (("general", "general-0"), ("general", "general-1"))
    assert ask(policy, snapshot).order[0] == ("general", "general-1")


def test_a_canary_gets_its_share_and_draws_repeat():
    policy = composed(rules=[rule(weights={"general": 90, "spare": 10, "fast": 0})])
    firsts = Counter(ask(policy, id=f"r{n}").pool for n in range(2000))
    assert firsts["fast"] == 0
    assert 130 < firsts["spare"] < 275
    assert ask(policy, id="r7") == ask(policy, id="r7")
    decision = ask(policy)
    assert (decision.reason, set(pools_of(decision)[:2])) == (Reason.WEIGHT, {"general", "spare"})


def test_draws_stick_to_sessions_or_tenants():
    for by in ("session", "tenant"):
        policy = composed(rules=[rule(weights={"general": 1, "spare": 1}, sticky=by)])
        one = {ask(policy, id=f"r{n}", **{by: "s1"}).pool for n in range(50)}
        many = {ask(policy, id="r", **{by: f"s{n}"}).pool for n in range(50)}
        assert (len(one), len(many)) == (1, 2)
    lone = composed(rules=[rule(weights={"general": 1, "spare": 1}, sticky="session")])
    assert len({ask(lone, id=f"r{n}").pool for n in range(50)}) == 2, "without a session each request draws"


def test_reserve_pools_come_last_and_only_for_what_nobody_else_can():
    policy = composed(fallback=["general", "spare"])
    assert pools_of(ask(policy)) == ["fast", "general", "spare"]
    decision = ask(policy, sick(fleet(), "fast", "general"))
    assert (decision.pool, decision.reason) == ("spare", Reason.FALLBACK)
    ruled = composed(fallback=["spare"], rules=[rule(pools=["fast"])])
    assert pools_of(ask(ruled)) == ["fast", "general", "spare"]
    named = composed(fallback=["spare"], rules=[rule(pools=["spare"])])
    assert pools_of(ask(named))[0] == "spare"


def test_a_shadow_is_there_to_be_asked():
    policy = composed(shadow={"type": "round_robin"})
    assert policy.shadow is not None
    assert policy.shadow.choose(request(), fleet(), 0.0, random.Random(0)).policy == "round_robin"
    assert ask(policy).policy == "slo_threshold"


def test_what_learns_is_told_wherever_it_stands():
    likes = [{"type": "like"}]
    policy = composed(scorers=likes, rules=[rule(scorers=likes)], shadow={"type": "slo", "scorers": likes})
    before = Like.seen
    policy.observe(RequestRecord("r", MODEL, "fast", "fast-0", None, "rule", "ok"))
    assert Like.seen == before + 3


RULES = [
    rule("canary", match={"tenant": ["t1"]}, weights={"fast": 1, "general": 3}),
    rule("long", match={"prompt_tokens": {"at_least": 1000}}, pools=["general"]),
    rule("tight", match={"tpot_ms": {"below": 10}}, scorers=[{"type": "like", "config": {"names": ["fast-1"]}}]),
]


@pytest.mark.parametrize("base", ["slo", "round_robin", "power_of_two", "weighted", "slo_threshold"])
class TestComposed(PolicyConformance):
    @pytest.fixture
    def policy(self, base: str) -> Composed:
        return composed(
            base,
            rules=RULES,
            filters=[{"type": "drop", "config": {"names": ["other"]}}, {"type": "slo_headroom", "soft": True}],
            scorers=[{"type": "load"}, {"type": "prefix_affinity"}, {"type": "junk"}],
            fallback=["spare"],
        )


def test_each_prediction_is_made_once_a_choice_and_none_is_kept() -> None:
    class Counting:
        def __init__(self) -> None:
            self.asked = Counter[tuple[str, int, str]]()

        def predict(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> Prediction:
            self.asked[pool.name, len(pool.nodes), node.name] += 1
            return Prediction(10.0, 1.0, 0.0)

    latency = Counting()
    made = composed("slo", filters=[{"type": "slo_headroom"}], scorers=[{"type": "headroom"}, {"type": "load"}])
    decision = ask(made, replace(fleet(), latency=latency), slo=SLO(ttft_ms=100.0))
    assert len(decision.order) == len(latency.asked) == 6
    assert set(latency.asked.values()) == {1}
    assert len(decision.candidates) == 6
    assert set(latency.asked.values()) == {2}, "who asks why has them made again"
