"""The choice of a prefill instance: by a policy, as that of a node, over a picture of the instances alone."""

from __future__ import annotations

from collections.abc import Collection

from pdhub.api.errors import AdmissionRejected
from pdhub.api.policy import NodeView, PoolView, Snapshot
from pdhub.api.request import RequestView
from pdhub.core.admission import Ticket
from pdhub.core.latency import PREFILL
from pdhub.router.context import Context
from pdhub.router.endpoint import Endpoint
from pdhub.router.errors import no_endpoints
from pdhub.router.fleet import EVERYTHING
from pdhub.router.flight import Flight


def choose_prefill(
    context: Context, flight: Flight, view: RequestView, able: Collection[Endpoint], ticket: Ticket, now: float
) -> Endpoint:
    """The instance that computes a prompt.

    Args:
        able: those that fit the node. Which do is a fact of layouts, features and breakers, not the policy's to decide.
        ticket: of the request in front of prefill instances.

    Raises:
        AdmissionRejected: the policy takes none of them.
    """
    decision = flight.rules.prefill.choose(view, picture(context, view, able, ticket, now), now, context.rng)
    by_name = {endpoint.name: endpoint for endpoint in able}
    if decision.node is None or decision.node not in by_name:
        raise _nobody(decision.reason.value)
    return by_name[decision.node]


def picture(context: Context, view: RequestView, able: Collection[Endpoint], ticket: Ticket, now: float) -> Snapshot:
    """The instances as one pool of role ``prefill``; what waits for one counts as sent if its turn comes before."""
    nodes = tuple(
        NodeView(
            name=endpoint.name,
            pool=PREFILL,
            health=endpoint.health(now),
            in_flight=endpoint.in_flight,
            load=endpoint.load,
            labels=endpoint.labels,
            slots=endpoint.slots,
            pending_tokens=endpoint.pending_tokens + context.lines.tokens_ahead(endpoint.name, ticket),
        )
        for endpoint in able
    )
    pool = PoolView(PREFILL, frozenset({view.model}), EVERYTHING, nodes, role="prefill", needs_prefill=False)
    current = context.fleet.snapshot(now)
    return Snapshot(current.version, (pool,), current.latency)


def _nobody(reason: str) -> AdmissionRejected:
    return no_endpoints(f"no prefill instance is left ({reason})")
