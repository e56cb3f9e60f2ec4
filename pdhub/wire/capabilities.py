"""Capabilities on their way from a node or an embedded prefill instance to the router."""

from __future__ import annotations

from pdhub.api.engine import Capabilities
from pdhub.api.request import Feature
from pdhub.wire.http import CapabilitiesBody


def told(capabilities: Capabilities) -> CapabilitiesBody:
    """As they travel."""
    return CapabilitiesBody(
        features=sorted(feature.value for feature in capabilities.features),
        max_context=capabilities.max_context,
        max_logprobs=capabilities.max_logprobs,
        slots=capabilities.slots,
        cancel_within_s=capabilities.cancel_within_s,
        max_top_k=capabilities.max_top_k,
        logprobs_from=capabilities.logprobs_from,
    )


def heard(body: CapabilitiesBody) -> Capabilities:
    """As the router knows them. A newer node may declare features that this router has no name for."""
    return Capabilities(
        features=frozenset(Feature(name) for name in body.features if name in Feature._value2member_map_),
        max_context=body.max_context,
        max_logprobs=body.max_logprobs,
        slots=body.slots,
        cancel_within_s=body.cancel_within_s,
        max_top_k=body.max_top_k,
        logprobs_from=body.logprobs_from,
    )
