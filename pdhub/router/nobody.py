"""Why nobody can take a request, as an error that a person can act on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdhub.api.errors import InvalidRequest, RequestError
from pdhub.api.policy import Decision, Reason
from pdhub.api.request import Feature, RequestView
from pdhub.core.admission import DroppedReason
from pdhub.policies.capable import beyond
from pdhub.router.errors import no_endpoints
from pdhub.router.fleet import Fleet
from pdhub.router.gate import rejection
from pdhub.router.openai import ClientRequest
from pdhub.router.parsing import Parsing
from pdhub.wire.errors import context_length_message

_MEMBERS: Mapping[Feature, tuple[str, ...]] = {
    Feature.SAMPLING: ("temperature", "top_p"),
    Feature.GRAMMAR: (
        "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "tool_choice", "tools",
    ),
    Feature.TOOLS: ("tools", "functions"),
    Feature.MULTIMODAL: ("messages", "prompt_embeds", "audio"),
    Feature.REASONING: ("reasoning_effort", "reasoning"),
    Feature.N: ("n", "prompt"),
    Feature.BEST_OF: ("best_of", "use_beam_search"),
    Feature.EXTENSIONS: (
        "bad_words", "allowed_token_ids", "logprob_token_ids", "suffix", "chat_template", "vllm_xargs",
    ),
}  # fmt: skip
"""Where a feature's name is not the member's."""


def nobody(
    decision: Decision,
    request: ClientRequest,
    fleet: Fleet,
    parsing: Parsing,
    view: RequestView,
    retry_after_s: float | None = None,
) -> RequestError:
    """The error for a decision without nodes.

    Args:
        view: what the policy saw of the request.
        retry_after_s: when a place may be free, if one is missing.
    """
    if decision.reason is Reason.SHED:
        return rejection(DroppedReason.SATURATED, retry_after_s, shed=True)
    if decision.reason is Reason.FILTERED:
        return no_endpoints("the routing policy leaves no node for this request")
    if decision.reason is not Reason.NO_CAPABLE_POOL or not decision.candidates:
        return no_endpoints("no node is ready")
    lacks = [view.features - p.capabilities.features for p in fleet.pools.values() if p.client.speaks_tokens]
    if any(parsing.absent(missing) for missing in lacks):
        return no_endpoints("the parser of reasoning and tool calls is not ready")
    dropped = {c.dropped_by for c in decision.candidates}
    if "context" in dropped:
        return _too_long(request, fleet)
    why = sorted({c.why for c in decision.candidates if c.dropped_by == "capability"})
    param = _member(request.body, fleet, request.features) or _beyond(view, fleet)
    what = f"{param}: " if param else ""
    return InvalidRequest(f"{what}no pool can serve this request ({'; '.join(why)})", param=param, code="unsupported")


def _too_long(request: ClientRequest, fleet: Fleet) -> InvalidRequest:
    widest = max(pool.capabilities.max_context for pool in fleet.pools.values())
    limit = request.max_tokens or 1
    message = context_length_message(widest, request.prompt_low, limit)
    return InvalidRequest(message, param="max_tokens", code="context_length_exceeded")


def _member(body: Mapping[str, Any], fleet: Fleet, features: frozenset[Feature]) -> str | None:
    """The body's member behind the first feature that no pool has."""
    offered = frozenset[Feature]().union(*(pool.capabilities.features for pool in fleet.pools.values()))
    for feature in sorted(set(Feature) - offered):
        for member in _MEMBERS.get(feature, (feature.value,)):
            if body.get(member) is not None and (feature in features or feature in _FROM_SAMPLING):
                return member
    return None


def _beyond(view: RequestView, fleet: Fleet) -> str | None:
    """The member whose value is outside what pools honour that have the feature."""
    able = [p.capabilities for p in fleet.pools.values() if view.features <= p.capabilities.features]
    exceeded = [found[0] for capabilities in able if (found := beyond(view, capabilities)) is not None]
    return exceeded[0] if exceeded else None


_FROM_SAMPLING = frozenset(
    {
        Feature.SAMPLING, Feature.TOP_K, Feature.MIN_P, Feature.PRESENCE_PENALTY, Feature.FREQUENCY_PENALTY,
        Feature.REPETITION_PENALTY, Feature.SEED, Feature.LOGIT_BIAS,
    }
)  # fmt: skip
