"""What the engine can do, without torch."""

from __future__ import annotations

from pdhub.api import Capabilities, Feature
from pdhub_transformers.config import TransformersConfig

FEATURES = frozenset(
    {
        Feature.SAMPLING,
        Feature.TOP_K,
        Feature.MIN_P,
        Feature.PRESENCE_PENALTY,
        Feature.FREQUENCY_PENALTY,
        Feature.REPETITION_PENALTY,
        Feature.SEED,
        Feature.LOGIT_BIAS,
        Feature.LOGPROBS,
        Feature.IGNORE_EOS,
        Feature.MIN_TOKENS,
        Feature.STOP_TOKEN_IDS,
    }
)

MAX_LOGPROBS = 20
DEFAULT_CONTEXT = 8192
"""Most tokens a request may have unless the configuration says more: a row is reserved for each landing."""

CANCEL_WITHIN_S = 2.0
"""A stream ends between two steps; a step of a model that is worth serving takes far less."""


def declared(config: TransformersConfig) -> Capabilities:
    """Before the model is known; its own limit may be shorter."""
    context = config.max_context or DEFAULT_CONTEXT
    return Capabilities(FEATURES, context, MAX_LOGPROBS, config.slots, CANCEL_WITHIN_S)
