"""The built-in policy: the kit's rules, and its own."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import SLO, Capabilities, Feature, Health, NodeView, PoolView, Reason, RequestView, Snapshot
from pdhub.policies.slo_threshold import SloThreshold, SloThresholdConfig
from pdhub.testing.policy_kit import PolicyConformance

CONFIG = SloThresholdConfig(tpot_below_ms=20, fast="fast", otherwise="general")


class TestSloThreshold(PolicyConformance):
    @pytest.fixture
    def policy(self):
        return SloThreshold(CONFIG)


def node(name, pool, in_flight=0, health=Health.READY):
    return NodeView(name, pool, health, in_flight)


def snapshot(*nodes, features=frozenset(), logprobs=0):
    pools = {}
    for n in nodes:
        pools.setdefault(n.pool, []).append(n)
    capabilities = Capabilities(features, 1000, logprobs, 1)
    return Snapshot(1, tuple(PoolView(p, frozenset({"m"}), capabilities, tuple(ns)) for p, ns in pools.items()))


def choose(picture, now=0.0, **members):
    request = RequestView("r", "m", "/v1/completions", prompt_tokens=10, **members)
    return SloThreshold(CONFIG).choose(request, picture, now, random.Random(0))


BOTH = snapshot(node("g0", "general"), node("f0", "fast"), node("f1", "fast", 1))


@pytest.mark.parametrize(
    ("slo", "pool", "reason"),
    [
        (SLO(tpot_ms=19.9), "fast", Reason.TPOT_BELOW_THRESHOLD),
        (SLO(tpot_ms=20.0), "general", Reason.RULE),
        (SLO(), "general", Reason.NO_SLO),
        (SLO(ttft_ms=1.0), "general", Reason.NO_SLO),
    ],
)
def test_the_threshold(slo, pool, reason):
    decision = choose(BOTH, slo=slo)
    assert (decision.pool, decision.reason) == (pool, reason)
    assert len(decision.order) == 3, "the other pool follows"


def test_least_in_flight_then_name():
    picture = snapshot(node("b", "general", 1), node("c", "general", 1), node("a", "general", 2))
    assert [n for _, n in choose(picture).order] == ["b", "c", "a"]


def test_fallback_says_so():
    picture = snapshot(node("g0", "general", health=Health.DOWN), node("f0", "fast"))
    decision = choose(picture)
    assert (decision.pool, decision.reason) == ("fast", Reason.FALLBACK)
    assert next(c for c in decision.candidates if c.node == "g0").why == "is down"


def test_gaps_name_what_is_missing():
    decision = choose(BOTH, features=frozenset({Feature.SEED}))
    assert decision.reason is Reason.NO_CAPABLE_POOL
    assert {c.dropped_by for c in decision.candidates} == {"capability"}
    assert "seed" in decision.candidates[0].why
    able = snapshot(node("g0", "general"), features=frozenset({Feature.LOGPROBS}), logprobs=5)
    assert choose(able, features=frozenset({Feature.LOGPROBS}), logprobs=5).order
    assert not choose(able, features=frozenset({Feature.LOGPROBS}), logprobs=6).order
    assert choose(BOTH, max_tokens=990).order
    assert choose(BOTH, max_tokens=991).candidates[0].dropped_by == "context"


def test_options_name_real_pools():
    CONFIG.check(["fast", "general", "x"])
    with pytest.raises(ValueError, match="otherwise"):
        CONFIG.check(["fast"])


views = st.builds(
    node,
    st.sampled_from([f"n{i}" for i in range(9)]),
    st.sampled_from(["fast", "general", "third"]),
    st.integers(0, 3),
    st.sampled_from(list(Health)),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(views, unique_by=lambda n: n.name, max_size=8),
    st.randoms(use_true_random=False),
    st.floats(0, 1e6),
    st.none() | st.floats(0.1, 100),
)
def test_pure_and_blind_to_order(nodes, rng, now, tpot):
    picture = snapshot(*nodes)
    pools = [replace(p, nodes=tuple(rng.sample(p.nodes, len(p.nodes)))) for p in picture.pools]
    shuffled = Snapshot(9, tuple(rng.sample(pools, len(pools))))
    assert choose(picture, slo=SLO(tpot_ms=tpot)) == choose(shuffled, now=now, slo=SLO(tpot_ms=tpot))
