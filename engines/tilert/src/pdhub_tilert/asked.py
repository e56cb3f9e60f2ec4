"""What a hosted node is asked for: refused, or said in TileRT's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pdhub.api import Capabilities, DecodeRequest, Feature, InvalidRequest, Unsupported

GREEDY: Final = 1e-5
"""Below this temperature TileRT takes the best token."""


def refuse(request: DecodeRequest, capabilities: Capabilities) -> None:
    """Raises InvalidRequest for what the engine would ignore."""
    if request.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    for feature in _needs(request):
        if feature not in capabilities.features:
            raise Unsupported(f"TileRT cannot honour {feature}", param=str(feature))
    most, sampling = capabilities.max_top_k, request.sampling
    if most is not None and sampling.top_k > most:
        raise Unsupported(f"top_k above {most} is not applied by TileRT", param="top_k")
    if request.logprobs is None:
        return
    if request.logprobs > capabilities.max_logprobs:
        raise Unsupported(f"at most {capabilities.max_logprobs} alternatives a token", param="logprobs")
    if GREEDY <= sampling.temperature < capabilities.logprobs_from:
        message = f"TileRT gives log probabilities at a temperature of {capabilities.logprobs_from} or more, or at 0"
        raise Unsupported(message, param="logprobs")


def sampling_of(request: DecodeRequest) -> dict[str, Any]:
    """The ``sampling`` of ``decode``."""
    s = request.sampling
    return {
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "repetition_penalty": s.repetition_penalty,
        "presence_penalty": s.presence_penalty,
        **({"ignore_eos": True} if request.ignore_eos else {}),
    }


def _needs(request: DecodeRequest) -> Iterator[Feature]:
    s = request.sampling
    sampled = s.temperature >= GREEDY and s.top_k != 1
    asked = {
        Feature.SAMPLING: s.temperature >= GREEDY,
        Feature.TOP_K: s.top_k > 0,
        Feature.SEED: s.seed is not None and sampled,
        Feature.MIN_P: s.min_p > 0,
        Feature.PRESENCE_PENALTY: s.presence_penalty != 0,
        Feature.FREQUENCY_PENALTY: s.frequency_penalty != 0,
        Feature.REPETITION_PENALTY: s.repetition_penalty != 1,
        Feature.LOGIT_BIAS: bool(s.logit_bias),
        Feature.LOGPROBS: request.logprobs is not None,
        Feature.IGNORE_EOS: request.ignore_eos,
        Feature.MIN_TOKENS: request.min_tokens > 0,
        Feature.STOP_TOKEN_IDS: bool(request.stop_token_ids),
    }
    return (feature for feature, wanted in asked.items() if wanted)
