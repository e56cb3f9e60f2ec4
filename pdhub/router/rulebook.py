"""What a reload replaces, as one immutable value: every request keeps the one that it started with."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

from pdhub.api.policy import AdmissionOrder, Policy
from pdhub.config.build import Plan
from pdhub.config.models import AdmissionConfig
from pdhub.config.version import version_of
from pdhub.core.slo_classes import Classes
from pdhub.policies.compose import Composed, compose, compose_prefill
from pdhub.policies.instances import Instances


@dataclass(frozen=True, slots=True)
class Rulebook:
    """Args:
    policy: the composed policy. prefill: the one that chooses prefill instances. Only these two learn.
    instances: the plugins behind both.
    version: of the configuration's two sections; equal content has an equal version.
    classes: how targets are read. headers: those that rules look at.
    order: of those that wait for a place. since_s: epoch seconds when it was made.
    """

    policy: Composed
    prefill: Policy
    instances: Instances
    version: str
    classes: Classes
    headers: Collection[str]
    admission: AdmissionConfig
    order: AdmissionOrder
    since_s: float


def rulebook(plan: Plan, before: Rulebook | None = None) -> Rulebook:
    """Args:
        before: the one that it replaces: policies and scorers that are configured as there keep what they learned.

    Raises what a plugin's factory raises.
    """
    instances = Instances(before.instances if before is not None else None)
    return Rulebook(
        policy=compose(plan, instances),
        prefill=compose_prefill(plan, instances),
        instances=instances,
        version=version_of(plan.config),
        classes=plan.classes,
        headers=plan.routing.headers,
        admission=plan.config.admission,
        order=cast(AdmissionOrder, plan.order.spec.factory(plan.order.config)),
        since_s=time.time(),
    )
