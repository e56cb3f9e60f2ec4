"""What a stock TileRT node can do: what its code honours, less what the node says that it lacks.

Everything absent here is refused by TileRT's own gate, or would be ignored by its kernels: stop ids, ``min_tokens``,
``min_p``, frequency penalty, seeds, biases, grammars, several sequences, prompt log probabilities, images. Stop
strings, log probabilities of both endpoints and special tokens are the router's own work on its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdhub.api import Capabilities, Feature
from pdhub_tilert.config import ModelConfig, TileRTNodeConfig
from pdhub_tilert.profiles import SHAPES, TOP_K_MOST, Profile

MOST_LOGPROBS: Final = 5
COLDEST_LOGPROBS: Final = 0.2
"""Below this temperature, greedy aside, TileRT gives no log probabilities."""

CANCEL_WITHIN_S: Final = 2.0


def declared(config: ModelConfig) -> Capabilities:
    """By the options alone: what a node with CUDA kernels says of itself."""
    told = {"ignore_eos": True}
    if isinstance(config, TileRTNodeConfig) and config.engine == "stub":
        told |= {"penalties": True, "logprobs": True}
    return of_node(config, {"profile": config.profile.value, "capabilities": told})


def of_node(config: ModelConfig, info: Mapping[str, Any]) -> Capabilities:
    """Args:
    info: the answer of `/capabilities`.
    """
    told = info.get("capabilities")
    told = told if isinstance(told, Mapping) else {}
    features = {Feature.SAMPLING}
    if SHAPES[_profile(config, info)].top_k:
        features.add(Feature.TOP_K)
    if told.get("penalties") is True:
        features |= {Feature.REPETITION_PENALTY, Feature.PRESENCE_PENALTY}
    if told.get("ignore_eos") is True:
        features.add(Feature.IGNORE_EOS)
    if told.get("logprobs") is True:
        features.add(Feature.LOGPROBS)
    known = frozenset(features if config.features is None else config.features)
    return Capabilities(
        features=known,
        max_context=config.max_seq_len - 1,  # it stops one short of its cache
        max_logprobs=MOST_LOGPROBS if Feature.LOGPROBS in known else 0,
        slots=1,
        cancel_within_s=CANCEL_WITHIN_S,
        max_top_k=TOP_K_MOST if Feature.TOP_K in known else None,
        logprobs_from=COLDEST_LOGPROBS if Feature.LOGPROBS in known else 0.0,
    )


def _profile(config: ModelConfig, info: Mapping[str, Any]) -> Profile:
    name = info.get("profile")
    return Profile(str(name)) if name in Profile._value2member_map_ else config.profile
