"""What vLLM can do, as far as that is known without asking a server."""

from __future__ import annotations

from typing import Final

from pdhub.api import Capabilities, Feature
from pdhub_vllm.config import Handoff, VLLMConfig

UNKNOWN_CONTEXT: Final = (1 << 31) - 1

SPLIT_CANNOT: Final = frozenset({Feature.N, Feature.BEST_OF, Feature.ECHO})
"""Not over two legs. Several sequences would share one remote request, which prefill frees after the first has read it;
an echo with log probabilities needs the prompt computed again where only its KV is."""


def declared(config: VLLMConfig) -> Capabilities:
    """Capabilities by the options alone; the context length comes with the first probe."""
    if config.features is not None:
        features = frozenset(config.features)
    elif config.handoff is Handoff.NONE:
        features = frozenset(Feature)
    else:
        features = frozenset(Feature) - SPLIT_CANNOT
    return Capabilities(features, config.max_context or UNKNOWN_CONTEXT, config.max_logprobs, config.slots)
