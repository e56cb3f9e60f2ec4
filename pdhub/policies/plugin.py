"""Registers the built-in policies."""

from __future__ import annotations

from pdhub.api.hooks import hookimpl
from pdhub.api.plugin import PolicySpec, Stability
from pdhub.policies.slo_threshold import NAME, SloThreshold, SloThresholdConfig


@hookimpl
def pdhub_register_policies() -> list[PolicySpec]:
    return [
        PolicySpec(
            name=NAME,
            summary="A TPOT target below a threshold goes to the fast pool, everything else to the other.",
            config=SloThresholdConfig,
            stability=Stability.BETA,
            factory=SloThreshold,
        )
    ]
