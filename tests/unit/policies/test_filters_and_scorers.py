"""Built-in filters and scorers, one by one."""

import pytest
from fleets import NOW, asked, busy, fleet, node

from pdhub.api import Feature, Health, RequestRecord
from pdhub.api.plugin import NoConfig
from pdhub.policies.affinity import PrefixAffinityConfig, PrefixAffinityScorer, SessionAffinityScorer
from pdhub.policies.filters import (
    CapabilityFilter,
    ContextLengthConfig,
    ContextLengthFilter,
    HealthFilter,
    LabelConfig,
    LabelFilter,
    SloHeadroomConfig,
    SloHeadroomFilter,
)
from pdhub.policies.scorers import (
    BacklogScorer,
    BacklogScorerConfig,
    CostScorer,
    HeadroomConfig,
    HeadroomScorer,
    LoadScorer,
    QueueDepthScorer,
)


def nodes_of(picture):
    return [(p, n) for p in picture.pools for n in p.nodes]


def dropped(filter, picture, request=None, **members):
    mine = filter.using(picture.latency)
    answers = {n.name: mine.drop(request or asked(**members), p, n, NOW) for p, n in nodes_of(picture)}
    return {name: why for name, why in answers.items() if why is not None}


def scores(scorer, picture, request=None, **members):
    nodes = nodes_of(picture)
    found = scorer.using(picture.latency).score(request or asked(**members), nodes, NOW)
    return {n.name: pytest.approx(s) for (_, n), s in zip(nodes, found, strict=True)}


def test_capability_and_health():
    picture = fleet(node("n0", "p"), node("n1", "p", health=Health.OPEN), features=frozenset({Feature.SEED}))
    assert not dropped(CapabilityFilter(NoConfig()), picture, features=frozenset({Feature.SEED}))
    why = dropped(CapabilityFilter(NoConfig()), picture, features=frozenset({Feature.TOOLS, Feature.N}))
    assert why["n0"] == "cannot do n, tools"
    assert dropped(HealthFilter(NoConfig()), picture) == {"n1": "is open"}


def test_context_length_keeps_room_for_the_answer():
    picture = fleet(node("n0", "p"))
    plain = ContextLengthFilter(ContextLengthConfig())
    assert not dropped(plain, picture, prompt_tokens=99_999)
    assert "not 100001" in dropped(plain, picture, prompt_tokens=99_999, max_tokens=2)["n0"]
    roomy = ContextLengthFilter(ContextLengthConfig(reserve=1000))
    assert dropped(roomy, picture, prompt_tokens=99_999)
    assert not dropped(roomy, picture, prompt_tokens=99_999, max_tokens=1)
    small = ContextLengthFilter(ContextLengthConfig(at_most=500))
    assert "at most 500" in dropped(small, picture, prompt_tokens=500)["n0"]


@pytest.mark.parametrize(
    ("match", "mode", "gone"),
    [
        ({"zone": "a"}, "require", {"n1", "n2"}),
        ({"zone": "*"}, "require", {"n2"}),
        ({"zone": "a"}, "exclude", {"n0"}),
        ({"zone": "*", "gpu": "x"}, "exclude", {"n0", "n1"}),
        ({"zone": "a", "gpu": "x"}, "require", {"n0", "n1", "n2"}),
    ],
)
def test_labels(match, mode, gone):
    picture = fleet(
        node("n0", "p"), node("n1", "p", labels={"zone": "b"}), node("n2", "q"), labels={"p": {"zone": "a"}}
    )
    assert set(dropped(LabelFilter(LabelConfig(match=match, mode=mode)), picture)) == gone


def test_slo_headroom_drops_what_would_miss():
    picture = fleet(node("n0", "p"), node("n1", "p"), node("n2", "p"), latency={"n0": (50, 10), "n1": (500, 30)})
    sure = SloHeadroomFilter(SloHeadroomConfig(explore=0))
    assert dropped(sure, picture, tpot=20) == {"n1": "predicted TPOT of 30.0 ms misses the target of 20 ms"}
    assert dropped(sure, picture, ttft=100) == {"n1": "predicted TTFT of 500.0 ms misses the target of 100 ms"}
    assert set(dropped(sure, picture, ttft=100, waited_ms=60)) == {"n0", "n1"}, "time already waited counts"
    assert not dropped(sure, picture)
    strict = SloHeadroomFilter(SloHeadroomConfig(explore=0, margin=0.4))
    assert set(dropped(strict, picture, tpot=20)) == {"n0", "n1"}


def test_slo_headroom_gives_another_chance():
    picture = fleet(node("n0", "p"), latency={"n0": (50, 30)})
    filter = SloHeadroomFilter(SloHeadroomConfig(explore=0.05))
    kept = [not dropped(filter, picture, id=f"request-{i}", tpot=20) for i in range(2000)]
    assert 50 < sum(kept) < 160


def test_load_and_queue():
    picture = fleet(
        node("n0", "p", 0, slots=4), node("n1", "p", 4, slots=4), node("n2", "p", 1, slots=4, load=busy(4, 4)),
    )  # fmt: skip
    assert scores(LoadScorer(NoConfig()), picture) == {"n0": 1.0, "n1": 0.5, "n2": 1 / 3}
    assert scores(QueueDepthScorer(NoConfig()), picture) == {"n0": 1.0, "n1": 1.0, "n2": 0.5}
    assert scores(BacklogScorer(BacklogScorerConfig(scale_tokens=100)), fleet(node("n0", "p", pending_tokens=300))) == {
        "n0": 0.25
    }


def test_cost():
    picture = fleet(node("a", "pa"), node("b", "pb"), node("c", "pc"), costs={"pa": 1.0, "pb": 4.0, "pc": 2.0})
    assert scores(CostScorer(NoConfig()), picture) == {"a": 1.0, "b": 0.25, "c": 0.5}
    free = fleet(node("a", "pa"), node("b", "pb"), costs={"pa": 0.0, "pb": 4.0})
    assert scores(CostScorer(NoConfig()), free) == {"a": 1.0, "b": 0.0}


def test_headroom():
    picture = fleet(node("n0", "p"), node("n1", "p"), node("n2", "p"), latency={"n0": (0, 5), "n1": (0, 15)})
    assert scores(HeadroomScorer(HeadroomConfig()), picture, tpot=10) == {"n0": 0.75, "n1": 0.25, "n2": 0.5}
    assert scores(HeadroomScorer(HeadroomConfig(prefer="least")), picture, tpot=20) == {
        "n0": 0.625,
        "n1": 0.875,
        "n2": 0.5,
    }
    assert set(scores(HeadroomScorer(HeadroomConfig()), picture)) == {"n0", "n1", "n2"}
    assert HeadroomScorer(HeadroomConfig()).score(asked(tpot=1), nodes_of(picture), NOW) == [0.5] * 3


def test_a_session_has_one_node_a_pool():
    picture = fleet(*(node(f"{p}{i}", p) for p in "ab" for i in range(4)))
    scorer = SessionAffinityScorer(NoConfig())
    homes = set()
    for n in range(200):
        found = scores(scorer, picture, session=f"s{n}")
        mine = [name for name, score in found.items() if score == 1.0]
        assert len(mine) == 2
        assert {name[0] for name in mine} == {"a", "b"}
        homes.update(mine)
    assert len(homes) == 8
    assert all(score == 0.0 for score in scores(scorer, picture).values())


def test_a_node_that_leaves_moves_only_its_own_sessions():
    whole = fleet(*(node(f"n{i}", "p") for i in range(5)))
    less = fleet(*(node(f"n{i}", "p") for i in range(4)))
    scorer = SessionAffinityScorer(NoConfig())

    def home(picture, session):
        return next(name for name, score in scores(scorer, picture, session=session).items() if score == 1.0)

    for n in range(200):
        before = home(whole, f"s{n}")
        assert home(less, f"s{n}") == before or before == "n4"


def seen(scorer, node="n0", prefill=None, prefix=(), outcome="ok", **members):
    record = RequestRecord("r", "m", "p", node, prefill, "x", outcome, **{"ttft_ms": 1.0, **members}, prefix=prefix)
    scorer.observe(record)


def test_prefix_affinity_is_the_share_that_was_seen():
    scorer = PrefixAffinityScorer(PrefixAffinityConfig())
    picture = fleet(*(node(f"n{i}", "p") for i in range(3)))
    seen(scorer, "n0", prefix=(1, 2, 3, 4))
    seen(scorer, "n1", prefix=(1, 2))
    assert scores(scorer, picture, prefix=(1, 2, 3, 9)) == {"n0": 0.75, "n1": 0.5, "n2": 0.0}
    assert scores(scorer, picture, prefix=(8,)) == {"n0": 0.0, "n1": 0.0, "n2": 0.0}
    assert scores(scorer, picture) == {"n0": 0.0, "n1": 0.0, "n2": 0.0}


def test_prefix_affinity_learns_from_both_ends_and_only_from_work_done():
    scorer = PrefixAffinityScorer(PrefixAffinityConfig())
    picture = fleet(node("n0", "p"), node("pre", "(prefill)"))
    seen(scorer, "n0", "pre", prefix=(1,), ttft_ms=None, outcome="error")
    assert len(scorer) == 0
    seen(scorer, "n0", "pre", prefix=(1,))
    seen(scorer, "n1", prefix=(7,), ttft_ms=None)  # an answer in one piece: nobody knows when its first token was there
    assert len(scorer) == 2
    assert scores(scorer, picture, prefix=(1,)) == {"n0": 1.0, "pre": 1.0}


def test_prefix_affinity_is_bounded_and_keeps_what_is_shared():
    scorer = PrefixAffinityScorer(PrefixAffinityConfig(entries=100, holders=2))
    for n in range(5000):
        seen(scorer, f"n{n % 7}", prefix=(0, 1, 10_000 + n, 20_000 + n))
    assert len(scorer) == 100
    picture = fleet(*(node(f"n{i}", "p") for i in range(7)))
    found = scores(scorer, picture, prefix=(0, 1))
    assert sorted(name for name, score in found.items() if score == 1.0) == ["n0", "n1"], "the last two that saw it"
