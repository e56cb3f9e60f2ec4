"""What policies see of a request; the same for a request that is served and for one that is only explained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from pdhub.api.engine import Capabilities
from pdhub.api.request import Feature, RequestView, Sampling
from pdhub.core.slo import SloReading
from pdhub.router import sampling as sampling_rules
from pdhub.router.openai import ClientRequest

Seen = Callable[[Sequence[int], int], int | None]


def view_of(
    request: ClientRequest,
    asked: SloReading,
    sampling: Sampling,
    pools: Iterable[Capabilities],
    *,
    id: str,
    headers: Mapping[str, str],
    arrived_s: float,
    wall_s: float | None,
    seen: Seen | None = None,
    cached: Mapping[str, float] | None = None,
) -> RequestView:
    """Args:
    sampling: resolved. pools: what each pool can do. headers: those that rules may match.
    seen: how many tokens of a prompt, by digests and length, begin another one that was sent before.
    cached: as :attr:`RequestView.cached`.

    A prompt that looks too long everywhere is still tried where the context is widest: the estimate may be wrong, and
    prefill counts exactly before it computes.
    """
    widest = max((p.max_context for p in pools), default=0)
    features: frozenset[Feature] = request.features | sampling_rules.features_of(sampling)
    prompt = max(1, min(request.prompt_low, widest - (request.max_tokens or 1)))
    return RequestView(
        id=id,
        model=request.served,
        endpoint=request.endpoint,
        prompt_tokens=prompt,
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        features=features,
        sampling=sampling,
        slo=asked.slo,
        stream=request.stream,
        tenant=asked.tenant,
        priority=asked.priority,
        session=asked.session,
        headers=headers,
        prefix=request.prefix,
        arrived_s=arrived_s,
        wall_s=wall_s,
        seen_tokens=None if seen is None else seen(request.prefix, prompt),
        cached=cached or {},
    )
