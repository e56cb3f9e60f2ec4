"""Every built-in filter and scorer obeys its kit."""

import pytest

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
from pdhub.testing import FilterConformance, ScorerConformance

FILTERS = [
    CapabilityFilter(NoConfig()),
    HealthFilter(NoConfig()),
    ContextLengthFilter(ContextLengthConfig()),
    ContextLengthFilter(ContextLengthConfig(at_most=100, reserve=50)),
    LabelFilter(LabelConfig(match={"zone": "a"})),
    LabelFilter(LabelConfig(match={"zone": "*"}, mode="exclude")),
    SloHeadroomFilter(SloHeadroomConfig()),
    SloHeadroomFilter(SloHeadroomConfig(explore=0.5, margin=0.5)),
]

SCORERS = [
    LoadScorer(NoConfig()),
    QueueDepthScorer(NoConfig()),
    BacklogScorer(BacklogScorerConfig()),
    CostScorer(NoConfig()),
    HeadroomScorer(HeadroomConfig()),
    HeadroomScorer(HeadroomConfig(prefer="least")),
    SessionAffinityScorer(NoConfig()),
    PrefixAffinityScorer(PrefixAffinityConfig()),
]


@pytest.mark.parametrize("filter", FILTERS, ids=lambda f: type(f).__name__)
class TestFilters(FilterConformance):
    pass


@pytest.mark.parametrize("scorer", SCORERS, ids=lambda s: type(s).__name__)
class TestScorers(ScorerConformance):
    pass
