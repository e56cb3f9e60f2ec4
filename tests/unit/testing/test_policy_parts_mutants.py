"""Each rule of the kits for filters and scorers catches at least one broken one."""

import inspect

import pytest

from pdhub.api import Filter, Scorer
from pdhub.policies.filters import SloHeadroomConfig, SloHeadroomFilter
from pdhub.policies.scorers import HeadroomConfig, HeadroomScorer
from pdhub.testing import FilterConformance, ScorerConformance


class TestSoundFilter(FilterConformance):
    @pytest.fixture
    def filter(self):
        return SloHeadroomFilter(SloHeadroomConfig(explore=0))


class TestSoundScorer(ScorerConformance):
    @pytest.fixture
    def scorer(self):
        return HeadroomScorer(HeadroomConfig())


class Full(Filter):
    """Sound; drops full nodes."""

    def drop(self, request, pool, node, now):
        return "is full" if node.in_flight else None


class SaysNothing(Full):
    def drop(self, request, pool, node, now):
        return "" if node.in_flight else None


class Counts(Full):
    asked = 0

    def drop(self, request, pool, node, now):
        self.asked += 1
        return f"asked {self.asked} times"


class KeepsTheFirst(Full):
    """Looks at the questions before: with one request that is over, it is as if it had never been asked."""

    def __init__(self):
        self.last = None

    def drop(self, request, pool, node, now):
        again, self.last = self.last == request.id, request.id
        return "another one was kept" if again else None


class KeepsLatency(SloHeadroomFilter):
    def __init__(self):
        super().__init__(SloHeadroomConfig(explore=0))

    def using(self, latency):
        self._latency = latency
        return self


class WantsToKnow(Full):
    latency = None

    def using(self, latency):
        mine = WantsToKnow()
        mine.latency = latency
        return mine

    def drop(self, request, pool, node, now):
        return None if self.latency.predict(request, pool, node, now).tpot_ms else "who knows"


class Idle(Scorer):
    """Sound; prefers idle nodes."""

    def score(self, request, nodes, now):
        return [1 / (1 + node.in_flight) for _, node in nodes]


class TooLarge(Idle):
    def score(self, request, nodes, now):
        return [float(node.in_flight) for _, node in nodes]


class OneTooFew(Idle):
    def score(self, request, nodes, now):
        return super().score(request, nodes, now)[1:]


class LearnsByScoring(Idle):
    seen = 0

    def score(self, request, nodes, now):
        self.seen += 1
        return [1 / (self.seen + node.in_flight) for _, node in nodes]


class LikesTheFirst(Idle):
    def score(self, request, nodes, now):
        return [1 / (1 + place) for place in range(len(nodes))]


class NeedsSomebody(Idle):
    def score(self, request, nodes, now):
        most = max(node.in_flight for _, node in nodes)
        return [1.0 - node.in_flight / (most + 1) for _, node in nodes]


class ChokesOnHoles(Idle):
    def observe(self, record):
        assert record.ttft_ms > 0


class ScorerKeepsLatency(HeadroomScorer):
    def __init__(self):
        super().__init__(HeadroomConfig())

    def using(self, latency):
        self._latency = latency
        return self


FILTER_RULES = {
    "F01": [SaysNothing],
    "F02": [Counts],
    "F03": [KeepsTheFirst],
    "F04": [KeepsLatency],
    "F05": [WantsToKnow],
}
SCORER_RULES = {
    "S01": [TooLarge, OneTooFew],
    "S02": [LearnsByScoring],
    "S03": [LikesTheFirst],
    "S04": [NeedsSomebody],
    "S05": [ChokesOnHoles],
    "S06": [ScorerKeepsLatency],
}


def rules(kit):
    return {name.split("_")[1]: name for name in dir(kit) if name.startswith("test_")}


@pytest.mark.parametrize(("kit", "known"), [(FilterConformance, FILTER_RULES), (ScorerConformance, SCORER_RULES)])
def test_every_rule_has_a_mutant_and_a_reason(kit, known):
    assert set(rules(kit)) == set(known)
    assert all(getattr(kit, name).__doc__ for name in rules(kit).values())


CASES = [
    (kit, rule, mutant)
    for kit, known in ((FilterConformance, FILTER_RULES), (ScorerConformance, SCORER_RULES))
    for rule, mutants in known.items()
    for mutant in mutants
]


@pytest.mark.parametrize(("kit", "rule", "mutant"), CASES)
def test_mutant_is_caught(kit, rule, mutant):
    method = getattr(kit(), rules(kit)[rule])
    (name,) = inspect.signature(method).parameters
    with pytest.raises((AssertionError, TypeError, ValueError)):
        method(**{name: mutant()})


@pytest.mark.parametrize(("kit", "sound"), [(FilterConformance, Full), (ScorerConformance, Idle)])
def test_simple_sound_ones_pass(kit, sound):
    for name in rules(kit).values():
        method = getattr(kit(), name)
        (parameter,) = inspect.signature(method).parameters
        method(**{parameter: sound()})
