"""Registers the built-in policies, filters and scorers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from pdhub.api.hooks import hookimpl
from pdhub.api.plugin import NoConfig, PolicyPart, PolicySpec, Stability
from pdhub.policies import (
    affinity,
    filters,
    orders,
    power_of_two,
    prefill,
    round_robin,
    scorers,
    slo,
    slo_threshold,
    weighted,
)


def _spec(
    part: PolicyPart, name: str, config: type[BaseModel], factory: Callable[[Any], Any], summary: str
) -> PolicySpec:
    return PolicySpec(name=name, summary=summary, config=config, stability=Stability.BETA, part=part, factory=factory)


POLICY, FILTER, SCORER, ADMISSION = PolicyPart.POLICY, PolicyPart.FILTER, PolicyPart.SCORER, PolicyPart.ADMISSION


@hookimpl
def pdhub_register_policies() -> list[PolicySpec]:
    return [
        _spec(
            POLICY, slo.NAME, slo.SloConfig, slo.Slo,
            "The cheapest pool that attains the targets, and in it the fullest node that still does.",
        ),
        _spec(
            POLICY, slo_threshold.NAME, slo_threshold.SloThresholdConfig, slo_threshold.SloThreshold,
            "A TPOT target below a threshold goes to the fast pool, everything else to the other.",
        ),
        _spec(
            POLICY, weighted.NAME, weighted.WeightedConfig, weighted.Weighted,
            "A share of the traffic a pool, as for a canary.",
        ),
        _spec(
            POLICY, round_robin.NAME, round_robin.RoundRobinConfig, round_robin.RoundRobin,
            "Every node in turn, whatever it is good at.",
        ),
        _spec(
            POLICY, power_of_two.NAME, NoConfig, power_of_two.PowerOfTwo,
            "Of two nodes drawn by chance the emptier one.",
        ),
        _spec(
            POLICY, prefill.NAME, prefill.PrefillChoiceConfig, prefill.PrefillChoice,
            "For prefill instances: a short backlog, and a prompt whose beginning it has seen.",
        ),
        _spec(FILTER, "capability", NoConfig, filters.CapabilityFilter, "Drops pools that cannot do what is asked."),
        _spec(FILTER, "health", NoConfig, filters.HealthFilter, "Drops nodes that are not ready."),
        _spec(
            FILTER, "context_length", filters.ContextLengthConfig, filters.ContextLengthFilter,
            "Drops pools whose context is too short.",
        ),
        _spec(FILTER, "label", filters.LabelConfig, filters.LabelFilter, "Keeps or drops nodes by label."),
        _spec(
            FILTER, "slo_headroom", filters.SloHeadroomConfig, filters.SloHeadroomFilter,
            "Drops nodes that are predicted to miss a target.",
        ),
        _spec(
            SCORER, "headroom", scorers.HeadroomConfig, scorers.HeadroomScorer,
            "By what a prediction leaves of the tightest target.",
        ),
        _spec(SCORER, "queue_depth", NoConfig, scorers.QueueDepthScorer, "Fewest waiting requests."),
        _spec(SCORER, "load", NoConfig, scorers.LoadScorer, "Fewest requests a place."),
        _spec(
            SCORER, "backlog", scorers.BacklogScorerConfig, scorers.BacklogScorer,
            "Fewest prompt tokens that are not computed yet.",
        ),
        _spec(SCORER, "cost", NoConfig, scorers.CostScorer, "Cheapest pool."),
        _spec(
            SCORER, "session_affinity", NoConfig, affinity.SessionAffinityScorer,
            "A session's own node, the same for all routers.",
        ),
        _spec(
            SCORER, "prefix_affinity", affinity.PrefixAffinityConfig, affinity.PrefixAffinityScorer,
            "The node that saw most of the prompt's beginning.",
        ),
        _spec(
            ADMISSION, orders.PRIORITY_DEADLINE, orders.OrderConfig, orders.PriorityDeadline,
            "The more important first, tenants in turn, of equals the most urgent.",
        ),
        _spec(ADMISSION, orders.FIFO, orders.OrderConfig, orders.Fifo, "As they came."),
    ]  # fmt: skip
