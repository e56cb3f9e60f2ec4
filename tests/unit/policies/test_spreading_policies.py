"""``weighted``, ``round_robin``, ``power_of_two`` and ``prefill``: how they spread requests."""

import random
from collections import Counter

import pytest
from fleets import ask, asked, busy, fleet, node

from pdhub.api import Health, Reason, RequestRecord
from pdhub.api.plugin import NoConfig
from pdhub.policies.power_of_two import PowerOfTwo
from pdhub.policies.prefill import PrefillChoice, PrefillChoiceConfig
from pdhub.policies.round_robin import RoundRobin, RoundRobinConfig
from pdhub.policies.weighted import Weighted, WeightedConfig


def record(node="n0", prefill=None, **members):
    return RequestRecord("r", "m", "p", node, prefill, "x", "ok", ttft_ms=1.0, **members)


def count(policy, picture, n=4000, **members):
    return Counter(ask(policy, picture, id=f"request-{i}", **members).pool for i in range(n))


THREE = fleet(node("a0", "a"), node("a1", "a", 1), node("b0", "b"), node("c0", "c"))


@pytest.mark.parametrize(
    ("weights", "shares"), [({}, (1, 1, 1)), ({"a": 9, "b": 0.5, "c": 0.5}, (9, 0.5, 0.5)), ({"c": 0}, (1, 1, 0))]
)
def test_weights_are_shares(weights, shares):
    found = count(Weighted(WeightedConfig(weights=weights)), THREE)
    for pool, share in zip("abc", shares, strict=True):
        assert found[pool] / 4000 == pytest.approx(share / sum(shares), abs=0.03)


def test_weights_of_what_is_left():
    sick = fleet(node("a0", "a", health=Health.DOWN), node("b0", "b"), node("c0", "c"))
    found = count(Weighted(WeightedConfig(weights={"a": 6, "b": 3, "c": 1})), sick)
    assert found["b"] / 4000 == pytest.approx(0.75, abs=0.03)
    only = fleet(node("c0", "c"))
    assert ask(Weighted(WeightedConfig(weights={"c": 0})), only).reason is Reason.FALLBACK
    decision = ask(Weighted(WeightedConfig()), THREE, id="request-1")
    assert decision.reason is Reason.WEIGHT
    assert len(decision.order) == 4
    assert decision.order.index(("a", "a0")) < decision.order.index(("a", "a1")), "in a pool the emptiest node"


def test_a_request_draws_once():
    policy = Weighted(WeightedConfig(weights={"a": 1, "b": 1}))
    assert len({ask(policy, THREE, id="one").order for _ in range(20)}) == 1


@pytest.mark.parametrize(
    "options", [(WeightedConfig(weights={"x": 1}), "weights"), (RoundRobinConfig(pools=["x"]), "pools")]
)
def test_options_name_real_pools(options):
    config, name = options
    config.check(["a", "x"])
    with pytest.raises(ValueError, match=name):
        config.check(["a"])


def turns(policy, names, rounds):
    """Nodes in order, one request after the other, each observed."""
    taken = []
    for i in range(rounds):
        taken.append(ask(policy, fleet(*(node(n, "p") for n in names)), id=f"r{i}").node)
        policy.observe(record(taken[-1]))
    return taken


def test_everybody_in_turn():
    policy = RoundRobin(RoundRobinConfig())
    assert turns(policy, ["n0", "n1", "n2"], 7) == ["n0", "n1", "n2", "n0", "n1", "n2", "n0"]


@pytest.mark.parametrize("seed", range(5))
def test_in_turn_whenever_requests_end(seed):
    """The slow n0 ends nothing; ends of the others in any order, never at once, change no turn."""
    policy, open_requests, taken, rng = RoundRobin(RoundRobinConfig()), Counter(), [], random.Random(seed)
    for i in range(30):
        picture = fleet(*(node(f"n{k}", "p", open_requests[f"n{k}"]) for k in range(3)))
        taken.append(ask(policy, picture, id=f"r{i}").node)
        open_requests[taken[-1]] += 1
        while rng.random() < 0.5 and (running := sorted(n for n in +open_requests if n != "n0")):
            done = rng.choice(running)
            open_requests[done] -= 1
            policy.observe(record(done))
    assert taken == ["n0", "n1", "n2"] * 10


def test_nodes_that_come_are_not_flooded():
    policy = RoundRobin(RoundRobinConfig())
    turns(policy, ["n0", "n1"], 100)
    assert Counter(turns(policy, ["n0", "n1", "n2"], 30)) == {"n0": 10, "n1": 10, "n2": 10}


def test_turns_of_some_pools():
    policy = RoundRobin(RoundRobinConfig(pools=["b"]))
    picture = fleet(node("a0", "a"), node("b0", "b", 7))
    assert (ask(policy, picture).pool, ask(policy, picture).reason) == ("b", Reason.ROUND_ROBIN)
    only = fleet(node("a0", "a"))
    assert ask(policy, only).reason is Reason.FALLBACK


def test_the_emptier_of_two():
    policy = PowerOfTwo(NoConfig())
    picture = fleet(node("n0", "p", 0), node("n1", "p", 1), node("n2", "p", 2), node("n3", "p", 3))
    first = Counter(ask(policy, picture, id=f"request-{i}").node for i in range(4000))
    assert first["n3"] == 0, "the fullest never wins"
    for name, share in (("n0", 1 / 2), ("n1", 1 / 3), ("n2", 1 / 6)):
        assert first[name] / 4000 == pytest.approx(share, abs=0.03)
    decision = ask(policy, picture, id="request-3")
    assert sum(c.scores["drawn"] for c in decision.candidates) == 2
    assert len(decision.order) == 4


def test_two_choices_against_the_herd():
    """Sixteen routers with the same old picture: the emptiest node must not get everything."""
    picture = fleet(*(node(f"n{i}", "p", 3) for i in range(7)), node("idle", "p"))
    first = Counter(ask(PowerOfTwo(NoConfig()), picture, id=f"request-{i}").node for i in range(1000))
    assert first["idle"] < 400


def instances(*pending, **members):
    return fleet(
        *(node(f"n{i}", "(prefill)", pending_tokens=tokens, **members) for i, tokens in enumerate(pending)),
        role="prefill",
    )


def test_prefill_takes_the_shortest_backlog():
    policy = PrefillChoice(PrefillChoiceConfig())
    assert ask(policy, instances(900, 100, 500)).node == "n1"
    decision = ask(policy, instances(900, 100, 500), prompt_tokens=50)
    assert [c.scores["work_tokens"] for c in decision.candidates] == [950, 150, 550]
    spread = Counter(ask(policy, instances(0, 0), id=f"request-{i}").node for i in range(400))
    assert min(spread.values()) > 120


def test_prefill_weighs_the_cache_against_the_backlog():
    policy = PrefillChoice(PrefillChoiceConfig(hit=1.0))
    policy.observe(record("decode-0", "n1", prefix=(1, 2, 3, 4)))
    half = asked(prompt_tokens=1000, prefix=(1, 2, 7, 8))
    assert ask(policy, instances(0, 400), half).node == "n1", "400 tokens ahead, but 500 fewer to compute"
    assert ask(policy, instances(0, 600), half).node == "n0"
    blind = PrefillChoice(PrefillChoiceConfig(entries=0))
    blind.observe(record("decode-0", "n1", prefix=(1, 2, 3, 4)))
    assert ask(blind, instances(0, 400), half).node == "n0"


def test_any_policy_chooses_prefill_instances():
    for policy in (PowerOfTwo(NoConfig()), Weighted(WeightedConfig()), RoundRobin(RoundRobinConfig())):
        assert ask(policy, instances(1, 1), id="r").pool == "(prefill)"
    policy = RoundRobin(RoundRobinConfig())
    names = []
    for _ in range(4):
        names.append(ask(policy, instances(1, 1)).node)
        policy.observe(record("decode-0", names[-1]))
    assert names == ["n0", "n1", "n0", "n1"]


def test_prefill_instances_never_decode():
    both = fleet(node("d0", "p")).pools + instances(0).pools
    picture = fleet(node("d0", "p"))
    mixed = type(picture)(1, both, picture.latency)
    for policy in (PowerOfTwo(NoConfig()), RoundRobin(RoundRobinConfig()), PrefillChoice(PrefillChoiceConfig())):
        decision = ask(policy, mixed)
        assert decision.order == (("p", "d0"),)
        assert {c.dropped_by for c in decision.candidates} == {None, "role"}


def test_the_engines_word_counts_where_it_is_more():
    picture = fleet(node("n0", "p", 1, load=busy(6)), node("n1", "p", 2))
    assert ask(PowerOfTwo(NoConfig()), picture).node == "n1"
