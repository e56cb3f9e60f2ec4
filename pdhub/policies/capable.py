"""Which nodes can take a request at all: shared by every policy."""

from __future__ import annotations

from collections.abc import Sequence

from pdhub.api.engine import Capabilities
from pdhub.api.policy import Candidate, Health, NodeView, PoolView, Reason
from pdhub.api.request import Feature, RequestView

USABLE = frozenset({Health.READY, Health.HALF_OPEN})


def incapable(request: RequestView, pool: PoolView) -> str | None:
    """What the request asks for and the pool cannot do; None if it can do all."""
    missing = request.features - pool.capabilities.features
    if missing:
        return "cannot do " + ", ".join(sorted(missing))
    exceeded = beyond(request, pool.capabilities)
    return None if exceeded is None else exceeded[1]


def beyond(request: RequestView, capabilities: Capabilities) -> tuple[str, str] | None:
    """A value that is outside what an engine honours of a feature that it has, as (member of the body, why)."""
    sampling = request.sampling
    if Feature.LOGPROBS in request.features:
        if (request.logprobs or 0) > capabilities.max_logprobs:
            return "logprobs", f"gives at most {capabilities.max_logprobs} log probabilities a token"
        if 0 < sampling.temperature < capabilities.logprobs_from:
            why = f"gives log probabilities at a temperature of {capabilities.logprobs_from:g} or more, or at 0"
            return "logprobs", why
    most = capabilities.max_top_k
    if Feature.TOP_K in request.features and most is not None and sampling.top_k > most:
        return "top_k", f"applies a top_k of at most {most}, not {sampling.top_k}"
    return None


def too_long(tokens: int, pool: PoolView) -> str | None:
    """Why ``tokens``, prompt and output, do not fit the pool's context; None if they do."""
    if tokens > pool.capabilities.max_context:
        return f"has a context of {pool.capabilities.max_context} tokens, not {tokens}"
    return None


def gap(request: RequestView, pool: PoolView, role: str = "decode") -> tuple[str, str] | None:
    """The first thing that the pool cannot do for the request, as (filter, why); None if it can do all."""
    if pool.role != role:
        return "role", f"not a {role} pool"
    if request.model not in pool.models:
        return "model", f"does not serve {request.model}"
    if (why := incapable(request, pool)) is not None:
        return "capability", why
    if (why := too_long(request.prompt_tokens + (request.max_tokens or 1), pool)) is not None:
        return "context", why
    return None


def sift(
    request: RequestView, pools: Sequence[PoolView]
) -> tuple[list[tuple[PoolView, NodeView]], list[Candidate], Reason]:
    """Split all nodes into those that can take the request and the dropped ones.

    Only pools that decode can, unless there are only pools of role ``prefill``: then an instance for the prompt is
    chosen, which any policy may do.

    Returns:
        The kept nodes, the dropped ones with their reasons, and why there is nobody if nothing was kept.
    """
    kept: list[tuple[PoolView, NodeView]] = []
    dropped: list[Candidate] = []
    capable = False
    role = "prefill" if pools and all(pool.role == "prefill" for pool in pools) else "decode"
    for pool in pools:
        lack = gap(request, pool, role)
        capable = capable or lack is None
        for node in pool.nodes:
            if lack is not None:
                dropped.append(Candidate(pool.name, node.name, dropped_by=lack[0], why=lack[1]))
            elif node.health not in USABLE:
                dropped.append(Candidate(pool.name, node.name, dropped_by="health", why=f"is {node.health}"))
            else:
                kept.append((pool, node))
    return kept, dropped, Reason.NO_HEALTHY_NODE if capable else Reason.NO_CAPABLE_POOL
