"""The conformance kits for filters and scorers. Subclass, override the fixture::

class TestMine(FilterConformance):
    @pytest.fixture
    def filter(self):
        return MyFilter(MyConfig(...))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdhub.api import (
    EngineLoad,
    Feature,
    Filter,
    Health,
    NodeView,
    PoolView,
    Prediction,
    Predictor,
    RequestRecord,
    RequestView,
    Scorer,
)
from pdhub.testing.policy_kit import MODEL, FixedLatency, make_latency, make_pool, make_requests

POOLS = ("fast", "general")
NOW = 100.0

GOOD = FixedLatency({pool: Prediction(1e-3, 1e-3, 0.0) for pool in POOLS})
BAD = FixedLatency({pool: Prediction(1e6, 1e6, 1e6) for pool in POOLS})


def make_nodes() -> list[tuple[PoolView, NodeView]]:
    """Nodes of two pools in every state, with holes wherever a view may have some."""
    pools = [
        make_pool("fast", 4),
        replace(make_pool("general", 4, features=frozenset({Feature.SEED})), cost=0.0, labels={"zone": "a"}),
    ]
    nodes = []
    for pool in pools:
        for n, node in enumerate(pool.nodes):
            changed = (
                replace(node, health=Health.DOWN, in_flight=0, load=EngineLoad()),
                replace(node, slots=2, in_flight=5, queued=3, load=EngineLoad(running=9, waiting=4, kv_usage=0.9)),
                replace(node, slots=4, remaining_tokens=10, pending_tokens=500, labels={"zone": "b"}),
                replace(node, load=EngineLoad(kv_usage=1.0), tightest_tpot_ms=5.0),
            )
            nodes.append((pool, changed[n]))
    return nodes


def make_asked() -> list[RequestView]:
    """The policy kit's requests, with sessions and prefixes."""
    return [
        replace(request, session=f"s{n % 4}" if n % 3 else "", prefix=tuple(range(n % 5)), arrived_s=NOW - n / 10)
        for n, request in enumerate(make_requests())
    ]


class FilterConformance:
    """Rules for filters."""

    @pytest.fixture
    def filter(self) -> Filter:
        raise NotImplementedError("override the `filter` fixture with an instance of your filter")

    def test_F01_an_answer_says_why(self, filter: Filter) -> None:
        """None keeps; anything else is shown to people."""
        for _, _, why in _dropped(filter, make_latency(POOLS)):
            assert why is None or (isinstance(why, str) and why.strip())

    def test_F02_same_question_same_answer(self, filter: Filter) -> None:
        """Filters are pure: explaining a request changes nothing."""
        assert _dropped(filter, make_latency(POOLS)) == _dropped(filter, make_latency(POOLS))

    def test_F03_each_node_for_itself(self, filter: Filter) -> None:
        """Neither the order of the questions nor other nodes matter."""
        forwards = _dropped(filter, make_latency(POOLS))
        backwards = _dropped(filter, make_latency(POOLS), backwards=True)
        assert sorted(forwards, key=str) == sorted(backwards, key=str)

    def test_F04_using_changes_only_what_it_returns(self, filter: Filter) -> None:
        """Choices overlap, also with explain, and the filter is one for all of them."""
        asked = make_asked()
        alone = [_ask(filter.using(GOOD), request) for request in asked]
        mixed = []
        for request in asked:
            mine = filter.using(GOOD)
            _ask(filter.using(BAD), request)
            mixed.append(_ask(mine, request))
        assert mixed == alone

    def test_F05_unknown_is_no_reason(self, filter: Filter) -> None:
        """Without predictions it drops nothing that it keeps when all is predicted to go well."""
        for request in make_asked():
            known, unknown = _ask(filter.using(GOOD), request), _ask(filter.using(FixedLatency({})), request)
            assert {k for k, why in unknown.items() if why} <= {k for k, why in known.items() if why}


class ScorerConformance:
    """Rules for scorers."""

    @pytest.fixture
    def scorer(self) -> Scorer:
        raise NotImplementedError("override the `scorer` fixture with an instance of your scorer")

    def test_S01_one_number_a_node_between_0_and_1(self, scorer: Scorer) -> None:
        """Weights mean something only on one scale."""
        nodes = make_nodes()
        for latency in (make_latency(POOLS), GOOD, BAD, FixedLatency({})):
            for request in make_asked():
                scores = scorer.using(latency).score(request, nodes, NOW)
                assert len(scores) == len(nodes)
                assert all(math.isfinite(s) and 0 <= s <= 1 for s in scores), scores

    def test_S02_same_question_same_answer(self, scorer: Scorer) -> None:
        """State changes only in ``observe``."""
        assert _scores(scorer) == _scores(scorer)

    def test_S03_scores_belong_to_nodes_not_to_places(self, scorer: Scorer) -> None:
        """A preference for the first node would herd all routers onto it."""
        nodes = make_nodes()
        for request in make_asked():
            mine = scorer.using(make_latency(POOLS))
            forwards = mine.score(request, nodes, NOW)
            backwards = mine.score(request, nodes[::-1], NOW)
            assert list(forwards) == list(backwards)[::-1]

    def test_S04_nobody_is_no_error(self, scorer: Scorer) -> None:
        """Filters may leave no node, or one."""
        request = make_asked()[0]
        assert list(scorer.using(GOOD).score(request, [], NOW)) == []
        assert len(scorer.using(GOOD).score(request, make_nodes()[:1], NOW)) == 1

    def test_S05_observe_takes_any_record(self, scorer: Scorer) -> None:
        """Records of failed and cancelled requests have holes."""
        scorer.observe(RequestRecord("r", MODEL, None, None, None, "no-slo", "error", error_code="engine_failed"))
        scorer.observe(RequestRecord("r", MODEL, "gone", "gone-1", "p", "no-slo", "ok", ttft_ms=1.0, prefix=(1, 2)))
        assert len(_scores(scorer)) == len(make_asked())

    def test_S06_using_changes_only_what_it_returns(self, scorer: Scorer) -> None:
        """Choices overlap, also with explain, and the scorer is one for all of them."""
        nodes = make_nodes()
        for request in make_asked():
            alone = list(scorer.using(GOOD).score(request, nodes, NOW))
            mine = scorer.using(GOOD)
            scorer.using(BAD).score(request, nodes, NOW)
            assert list(mine.score(request, nodes, NOW)) == alone


def _ask(filter: Filter, request: RequestView) -> dict[str, str | None]:
    return {node.name: filter.drop(request, pool, node, NOW) for pool, node in make_nodes()}


def _dropped(filter: Filter, latency: Predictor, *, backwards: bool = False) -> list[tuple[str, str, str | None]]:
    step = -1 if backwards else 1
    answers = []
    for request in make_asked()[::step]:
        mine = filter.using(latency)
        answers += [(request.id, node.name, mine.drop(request, pool, node, NOW)) for pool, node in make_nodes()[::step]]
    return answers


def _scores(scorer: Scorer) -> Sequence[Sequence[float]]:
    nodes = make_nodes()
    return [list(scorer.using(make_latency(POOLS)).score(request, nodes, NOW)) for request in make_asked()]
