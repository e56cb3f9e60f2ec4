"""What another policy would have done, beside what was done: counted and logged, never followed."""

from __future__ import annotations

import logging

from pdhub.api.policy import Decision
from pdhub.api.request import RequestView
from pdhub.policies.compose import Composed
from pdhub.router.context import Context

log = logging.getLogger("pdhub.router.shadow")


def compare(context: Context, policy: Composed, request: RequestView, decision: Decision) -> None:
    """Ask the shadow of ``policy``, if it has one. Never raises: a shadow must not cost a request.

    Args:
        decision: what was decided for the same request at the same moment.
    """
    shadow = policy.shadow
    if shadow is None:
        return
    now = context.clock()
    try:
        other = shadow.choose(request, context.fleet.snapshot(now), now, context.rng)
    except Exception:
        log.exception("request %s: the shadow policy failed", request.id)
        context.metrics.shadow.labels("", "failed").inc()
        return
    agreement = "node" if decision.node == other.node else "pool" if decision.pool == other.pool else "none"
    context.metrics.shadow.labels(other.pool or "", agreement).inc()
    if agreement != "node":
        log.info(
            "request %s: %s took %s/%s (%s), the shadow %s would have taken %s/%s (%s)",
            request.id, decision.policy, decision.pool, decision.node, decision.reason,
            other.policy, other.pool, other.node, other.reason,
        )  # fmt: skip
