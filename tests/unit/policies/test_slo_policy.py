"""``slo``: cheapest pool that attains, fullest node that still does; what happens when none does or nobody knows."""

from collections import Counter
from dataclasses import replace

import pytest
from fleets import ask, asked, busy, fleet, node
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import SLO, Health, Prediction, Reason, RequestRecord, Snapshot
from pdhub.policies.slo import Slo, SloConfig
from pdhub.testing.policy_kit import FixedLatency

SURE = Slo(SloConfig(explore=0))
COSTS = {"fast": 4.0, "general": 1.0}
LATENCY = {"fast": (50, 4), "general": (80, 20)}


def two(**members):
    nodes = [node("f0", "fast", slots=1), node("g0", "general", slots=8), node("g1", "general", slots=8)]
    return fleet(*nodes, costs=COSTS, **{"latency": LATENCY, **members})


@pytest.mark.parametrize(
    ("ttft", "tpot", "pool", "reason"),
    [
        (None, None, "general", Reason.NO_SLO),
        (None, 30, "general", Reason.SLO_MET),
        (None, 10, "fast", Reason.SLO_MET),
        (60, None, "fast", Reason.SLO_MET),
        (200, 30, "general", Reason.SLO_MET),
        (60, 30, "fast", Reason.SLO_MET),
        (None, 3, "fast", Reason.SLO_LEAST_MISS),
        (10, 1, "fast", Reason.SLO_LEAST_MISS),
    ],
)
def test_the_cheapest_pool_that_attains(ttft, tpot, pool, reason):
    decision = ask(SURE, two(), ttft=ttft, tpot=tpot)
    assert (decision.pool, decision.reason) == (pool, reason)
    assert len(decision.order) == 3


def test_the_least_miss_need_not_be_the_faster_pool():
    latency = {"fast": (900, 4), "general": (100, 20)}
    assert ask(SURE, two(latency=latency), ttft=60, tpot=3).pool == "general"


def test_time_already_waited_counts():
    assert ask(SURE, two(), ttft=200).pool == "general"
    assert ask(SURE, two(), ttft=200, waited_ms=140).pool == "fast"
    decision = ask(SURE, two(), ttft=200, waited_ms=190)
    assert decision.reason is Reason.SLO_LEAST_MISS
    unstamped = replace(asked(ttft=200), arrived_s=0.0)
    assert ask(SURE, two(), unstamped).pool == "general"


def test_the_margin_keeps_room():
    assert ask(SURE, two(), tpot=22.3).pool == "general"
    assert ask(SURE, two(), tpot=21).pool == "fast", "20 of 21 ms is too close, where another one has room"
    alone = fleet(node("g0", "general"), latency=LATENCY)
    assert ask(SURE, alone, tpot=21).reason is Reason.SLO_MET, "but it attains"
    assert ask(Slo(SloConfig(margin=1.0)), two(), tpot=21).pool == "general"


def test_the_fullest_node_that_attains():
    latency = {"n0": (50, 10), "n1": (50, 12), "n2": (50, 18), "n3": (50, 30)}
    nodes = [node(f"n{i}", "general", load, slots=8) for i, load in enumerate((0, 2, 5, 7))]
    picture = fleet(*nodes, latency=latency)
    assert ask(SURE, picture, tpot=25).node == "n2"
    assert ask(SURE, picture, tpot=11.5).node == "n0", "only the empty node is fast enough: that is what it is kept for"
    assert ask(Slo(SloConfig(explore=0, fill=False)), picture, tpot=25).node == "n0"
    assert [n for _, n in ask(SURE, picture, tpot=25).order] == ["n2", "n1", "n0", "n3"]


def test_nodes_without_a_free_place_are_not_filled():
    nodes = [node("n0", "general", 3, slots=2), node("n1", "general", 2, slots=2), node("n2", "general", 1, slots=2)]
    picture = fleet(*nodes, latency={"general": (50, 10)})
    assert [n for _, n in ask(SURE, picture, tpot=25).order] == ["n2", "n1", "n0"]
    told = fleet(
        node("n0", "general", 0, slots=2, load=busy(2, 1)), node("n1", "general", 1, slots=2),
        latency={"general": (50, 10)},
    )  # fmt: skip
    assert ask(SURE, told, tpot=25).node == "n1", "other routers fill nodes too"


def test_a_neighbours_target_is_not_spoiled():
    nodes = [node("n0", "general", 3, slots=8, tightest_tpot_ms=15.0), node("n1", "general", 1, slots=8)]
    picture = fleet(*nodes, latency={"n0": (50, 16), "n1": (50, 12)})
    assert ask(SURE, picture, tpot=40).node == "n1"
    assert ask(SURE, picture).node == "n1"
    polite = fleet(replace(nodes[0], tightest_tpot_ms=17.0), nodes[1], latency={"n0": (50, 16), "n1": (50, 12)})
    assert ask(SURE, polite, tpot=40).node == "n0"


def test_without_a_target_the_emptiest_node_of_the_cheapest_pool():
    nodes = [node("g0", "general", 3, slots=8), node("g1", "general", 1, slots=8), node("f0", "fast", slots=1)]
    decision = ask(SURE, fleet(*nodes, costs=COSTS, latency=LATENCY))
    assert [n for _, n in decision.order] == ["g1", "g0", "f0"]
    same = fleet(node("a0", "a"), node("b0", "b", slots=8), node("b1", "b", slots=8), slots=1)
    assert ask(SURE, same).pool == "b", "of equal costs the one with more slots"


def test_without_a_target_they_spread_until_others_have_one():
    """Beside requests with targets those without stay together, and leave nodes for the others."""
    latency = {"g0": (50, 30), "g1": (50, 12), "g2": (50, 10)}
    alone = [node("g0", "general", 5, slots=8), node("g1", "general", 1, slots=8), node("g2", "general", slots=8)]
    assert [name for _, name in ask(SURE, fleet(*alone, latency=latency)).order] == ["g2", "g1", "g0"]
    beside = [replace(alone[0], tightest_tpot_ms=80.0), replace(alone[1], tightest_tpot_ms=15.0), alone[2]]
    assert [name for _, name in ask(SURE, fleet(*beside, latency=latency)).order] == ["g0", "g1", "g2"]
    spoilt = [beside[0], replace(beside[1], tightest_tpot_ms=11.5), alone[2]]
    assert [name for _, name in ask(SURE, fleet(*spoilt, latency=latency)).order] == ["g0", "g2", "g1"]
    full = [replace(beside[0], in_flight=8), *beside[1:]]
    assert ask(SURE, fleet(*full, latency=latency)).node == "g1"
    spread = Slo(SloConfig(explore=0, fill=False))
    assert ask(spread, fleet(*beside, latency=latency)).node == "g2"


def test_a_pool_for_requests_without_target():
    policy = Slo(SloConfig(throughput="fast"))
    assert ask(policy, two()).pool == "fast"
    assert ask(policy, two(), tpot=30).pool == "general"
    down = fleet(node("f0", "fast", health=Health.DOWN), node("g0", "general"), costs=COSTS)
    decision = ask(policy, down)
    assert (decision.pool, decision.reason) == ("general", Reason.FALLBACK)
    SloConfig(throughput="fast").check(["fast"])
    with pytest.raises(ValueError, match="throughput"):
        SloConfig(throughput="x").check(["fast"])


def test_when_the_cheapest_pool_is_down_it_says_so():
    down = fleet(node("f0", "fast"), node("g0", "general", health=Health.OPEN), costs=COSTS)
    assert (ask(SURE, down).pool, ask(SURE, down).reason) == ("fast", Reason.FALLBACK)


def test_unknown_is_neither_good_nor_bad():
    nothing = two(latency={})
    assert (ask(SURE, nothing, tpot=5).pool, ask(SURE, nothing, tpot=5).reason) == ("general", Reason.SLO_UNKNOWN)
    bad = two(latency={"general": (80, 20)})
    assert (ask(SURE, bad, tpot=5).pool, ask(SURE, bad, tpot=5).reason) == ("fast", Reason.SLO_UNKNOWN)
    good = two(latency={"fast": (50, 4)})
    assert (ask(SURE, good, tpot=5).pool, ask(SURE, good, tpot=5).reason) == ("fast", Reason.SLO_MET)


def test_half_known():
    half = two(latency={"general": (None, 20), "fast": (50, 4)})
    assert ask(SURE, half, ttft=100, tpot=5).pool == "fast"
    assert ask(SURE, half, ttft=100, tpot=30).pool == "fast", "known to attain comes before perhaps"
    assert ask(SURE, half, tpot=30).pool == "general", "what is not asked for need not be known"


def explored(policy, picture, n=2000, **members):
    return Counter(ask(policy, picture, id=f"request-{i}", **members).reason for i in range(n))


def test_the_unknown_gets_a_chance_now_and_then():
    policy = Slo(SloConfig(explore=0.1))
    picture = two(latency={"g0": (80, 20), "fast": (50, 4)})
    found = explored(policy, picture, tpot=30)
    assert set(found) == {Reason.SLO_MET, Reason.EXPLORE}
    assert 120 < found[Reason.EXPLORE] < 280
    tried = next(
        d for i in range(99) if (d := ask(policy, picture, id=f"request-{i}", tpot=30)).reason is Reason.EXPLORE
    )
    assert tried.node == "g1"
    assert tried.order[1:] == (("general", "g0"), ("fast", "f0"))


def test_what_is_not_tried():
    always = Slo(SloConfig(explore=1.0))
    dear = two(latency={"general": (80, 20)})
    assert ask(always, dear, tpot=30).reason is Reason.SLO_MET, "the unknown pool costs more"
    picture = two(latency={"g0": (80, 20)})
    assert ask(always, picture, tpot=30).reason is Reason.EXPLORE
    assert ask(always, picture, tpot=30, priority=1).reason is Reason.SLO_MET, "important requests are not for trying"
    full = fleet(node("g0", "general", slots=8), node("g1", "general", 8, slots=8), latency={"g0": (80, 20)})
    assert ask(always, full, tpot=30).reason is Reason.SLO_MET, "nor nodes without a place"


def test_shedding_is_for_the_sheddable():
    assert ask(SURE, two(), tpot=1, priority=0).reason is Reason.SLO_LEAST_MISS
    decision = ask(SURE, two(), tpot=1, priority=-1)
    assert (decision.order, decision.reason) == ((), Reason.SHED)
    assert all(c.dropped_by == "slo" and "miss a target" in c.why for c in decision.candidates)
    assert {c.scores["used"] for c in decision.candidates if c.pool == "fast"} == {4.0}
    assert ask(SURE, two(), priority=-1).order, "without a target there is nothing to miss"
    assert ask(SURE, two(latency={}), tpot=1, priority=-1).order, "nor with nothing known"
    assert ask(Slo(SloConfig(shed=False)), two(), tpot=1, priority=-1).order


def test_a_neighbour_that_is_lost_protects_nobody():
    nodes = [node("n0", "general", 3, slots=8, tightest_tpot_ms=10.0), node("n1", "fast", slots=8)]
    picture = fleet(*nodes, costs=COSTS, latency={"n0": (50, 10.5), "n1": (50, 4)})
    assert ask(SURE, picture, tpot=40).node == "n1"
    lost = fleet(*nodes, costs=COSTS, latency={"n0": (50, 20), "n1": (50, 4)})
    assert ask(SURE, lost, tpot=40).node == "n0", "its neighbour misses anyway; the fast pool is for those it can save"


def ended(priority=0, ttft=None, outcome="ok"):
    return RequestRecord("r", "m", "p", "n", None, "x", outcome, slo=SLO(ttft_ms=ttft), priority=priority)


def told(policy, *records):
    for record in records:
        policy.observe(record)
    return policy


def test_the_sheddable_leave_the_first_token_to_the_important():
    """All prompts wait in one line: a backlog that is short enough for patient work is too long for others."""
    policy = told(Slo(SloConfig(explore=0)), *[ended(ttft=100)] * 16, *[ended(-1)] * 16)
    assert ask(policy, two(), ttft=4000).order
    for members in ({"ttft": 4000}, {}):
        decision = ask(policy, two(), priority=-1, **members)
        assert (decision.order, decision.reason) == ((), Reason.SHED)
        assert {c.why for c in decision.candidates} == {
            "first token in 80 ms; more important requests leave 50 ms to those that may be shed"
        }
    assert ask(policy, two(latency={"general": (40, 20)}), priority=-1, ttft=4000).order
    assert ask(policy, two(latency={}), priority=-1).order, "what is unknown sheds nobody"
    assert ask(told(Slo(SloConfig(leave=0.9)), *[ended(ttft=100)] * 16), two(), priority=-1).order
    assert ask(told(Slo(SloConfig(shed=False)), *[ended(ttft=100)] * 16), two(), priority=-1).order


def test_what_the_important_ask_for_is_learned_and_forgotten():
    policy = told(Slo(SloConfig()), *[ended(-1, ttft=1)] * 64, *[ended()] * 64)
    assert ask(policy, two(), priority=-1).order, "neither the sheddable nor those without a target count"
    told(policy, ended(ttft=1), *[ended(ttft=1000)] * 39)
    assert ask(policy, two(), priority=-1).order, "one client that asks for the impossible turns nobody away"
    few = told(Slo(SloConfig()), ended(ttft=1), ended(ttft=1000), *[ended()] * 14)
    assert ask(few, two(), priority=-1).order, "nor where only few have targets"
    assert ask(told(Slo(SloConfig()), ended(ttft=1), *[ended()] * 15), two(), priority=-1).order
    told(policy, *[ended(ttft=100)] * 40)
    assert not ask(policy, two(), priority=-1).order
    told(policy, *[ended(-1)] * 256)
    assert ask(policy, two(), priority=-1).order, "they came no more"
    assert not ask(Slo(SloConfig(important_ttft_ms=100)), two(), priority=-1).order


def test_ties_spread_over_nodes_and_stay_with_the_request():
    picture = fleet(*(node(f"n{i}", "general", slots=8) for i in range(4)), latency={"general": (50, 10)})
    for members in ({}, {"tpot": 30}):
        found = Counter(ask(SURE, picture, id=f"request-{i}", **members).node for i in range(2000))
        assert set(found) == {"n0", "n1", "n2", "n3"}
        assert min(found.values()) > 400, "a fixed order would herd all routers onto one node"
        again = {ask(SURE, picture, id="one", **members).node for _ in range(9)}
        assert len(again) == 1


def test_explained_as_it_was_decided():
    decision = ask(SURE, two(), ttft=200, tpot=30)
    by_node = {c.node: c for c in decision.candidates}
    assert list(by_node) == ["f0", "g0", "g1"]
    assert by_node["f0"].predicted == Prediction(50, 4, 0.0)
    assert by_node["g0"].scores["used"] == pytest.approx(20 / 30)
    assert by_node["f0"].scores["cost"] == 4.0


milliseconds = st.none() | st.floats(0.1, 1e4)
nodes = st.lists(
    st.tuples(
        st.sampled_from(["fast", "general", "third"]), st.integers(0, 9), st.integers(0, 4), milliseconds, milliseconds
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(nodes, milliseconds, milliseconds, st.integers(-1, 1), st.randoms(use_true_random=False))
def test_never_worse_than_it_must_be(specs, ttft, tpot, priority, rng):
    """Whatever is known: somebody who attains is preferred to somebody who does not, and order means nothing."""
    views, known = [], {}
    for i, (pool, load, slots, first, each) in enumerate(specs):
        views.append(node(f"n{i}", pool, load, slots=slots))
        known[pool, f"n{i}"] = Prediction(first, each, 0.0)
    picture = replace(fleet(*views, costs=COSTS), latency=FixedLatency(known))
    request = asked(ttft=ttft, tpot=tpot, priority=priority)
    decision = ask(SURE, picture, request)
    shuffled = Snapshot(
        2,
        tuple(replace(p, nodes=tuple(rng.sample(p.nodes, len(p.nodes)))) for p in picture.pools[::-1]),
        picture.latency,
    )
    assert (decision.order, decision.reason) == ((again := ask(SURE, shuffled, request)).order, again.reason)
    assert decision.candidates == again.candidates

    def attains(key):
        seen = known[key]
        pairs = ((seen.ttft_ms, ttft), (seen.tpot_ms, tpot))
        return all(target is None or (value is not None and value <= target) for value, target in pairs)

    good = [attains(key) for key in decision.order]
    if ttft or tpot:
        assert good == sorted(good, reverse=True)
