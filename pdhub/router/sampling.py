"""Sampling of one request, resolved once and sent to both legs: two engines with defaults of their own would
otherwise sample the first token by other rules than the rest."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from pdhub.api.request import Feature, Sampling

_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")

SEED_LIMIT = 1 << 53
"""Seeds stay exact in JSON readers that know only doubles."""


def resolve(body: Mapping[str, Any], defaults: Mapping[str, float | int]) -> Sampling:
    """The client's members over the model's defaults over OpenAI's.

    Args:
        body: validated; null counts as absent.
        defaults: a prefill instance's ``sampling_defaults``.

    At temperature 0 everything that only shapes randomness is neutral, so that it asks nothing of an engine.
    """
    picked: dict[str, Any] = {}
    for name in _NUMBERS:
        value = body.get(name)
        value = defaults.get(name) if value is None else value
        if value is not None:
            picked[name] = float(value)
    top_k = body.get("top_k")
    top_k = defaults.get("top_k", 0) if top_k is None else top_k
    picked["top_k"] = max(0, int(top_k))
    picked["seed"] = body.get("seed")
    picked["logit_bias"] = {int(k): float(v) for k, v in (body.get("logit_bias") or {}).items()}
    sampling = Sampling(**picked)
    if sampling.temperature == 0.0:
        sampling = dataclasses.replace(sampling, top_p=1.0, top_k=0, min_p=0.0, seed=None)
    return sampling


def features_of(sampling: Sampling) -> frozenset[Feature]:
    """What these values ask of an engine."""
    asks = {
        Feature.SAMPLING: sampling.temperature > 0.0,
        Feature.TOP_K: sampling.top_k > 0,
        Feature.MIN_P: sampling.min_p > 0.0,
        Feature.PRESENCE_PENALTY: sampling.presence_penalty != 0.0,
        Feature.FREQUENCY_PENALTY: sampling.frequency_penalty != 0.0,
        Feature.REPETITION_PENALTY: sampling.repetition_penalty != 1.0,
        Feature.SEED: sampling.seed is not None,
        Feature.LOGIT_BIAS: bool(sampling.logit_bias),
    }
    return frozenset(feature for feature, asked in asks.items() if asked)


def with_seed(sampling: Sampling, features: frozenset[Feature]) -> Sampling:
    """Draw a seed for both legs if the client gave none and both engines can use one.

    Args:
        features: what the decode engine and the prefill instance both declare.
    """
    if sampling.seed is not None or sampling.temperature == 0.0 or Feature.SEED not in features:
        return sampling
    return dataclasses.replace(sampling, seed=secrets.randbelow(SEED_LIMIT))


def members_of(sampling: Sampling) -> dict[str, Any]:
    """As members of an OpenAI body; every value explicit, so that a server's own defaults never apply."""
    out: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if sampling.seed is not None:
        out["seed"] = sampling.seed
    if sampling.logit_bias:
        out["logit_bias"] = {str(k): v for k, v in sampling.logit_bias.items()}
    return out
