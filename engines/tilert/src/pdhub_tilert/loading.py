"""TileRT's own code in this process: its engine behind its adapter, and its arithmetic of received KV."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from pdhub.api import ConfigError, PluginError
from pdhub_tilert.config import TileRTNodeConfig
from pdhub_tilert.profiles import KVDtype

AR_STEPS: Final = 8
"""Steps that the kernels do between two looks, as TileRT's own server asks; `GLM5_AR_N` changes it."""

_HINT: Final = "pip install tilert==0.1.6.post3 in the node's Python (`python` of the pool)"


@dataclass(frozen=True, slots=True)
class TileRT:
    """What a node needs of TileRT.

    Args:
        engine: its ``PDEngine``: inject, decode, reset, and what it supports.
        latents: bytes of plane ``kv`` and number of tokens → bfloat16 ``[tokens, 512]``.
        keys: bytes of plane ``ki`` and number of tokens → bfloat16 ``[tokens, 128]``, rotated as its kernels want.
        request: makes what ``inject`` takes; its members are those of TileRT's ``ConvertedRequest``.
        device: where converted KV has to be; None = where the landing is.
    """

    engine: Any
    latents: Callable[[Tensor, int], Tensor]
    keys: Callable[[Tensor, int], Tensor]
    request: Callable[..., Any]
    device: str | None = None


def load(config: TileRTNodeConfig) -> TileRT:
    """Import TileRT and build its engine; with the kernels that takes minutes.

    Raises:
        PluginError: no TileRT here, or another version of it. ConfigError: no weights, no GPU.
    """
    try:
        profiles = importlib.import_module("tilert.pd_vllm.profiles.base")
        family = importlib.import_module("tilert.pd_vllm.profiles.mla_nsa")
        interface = importlib.import_module("tilert.pd_vllm.engine_iface")
    except ImportError as error:
        raise PluginError(f"TileRT cannot be imported: {error}", hint=_HINT) from error
    try:
        profile = profiles.get_profile(config.profile.value)
        dequantised, keys, request = profile._dequant_kv, profile._dequant_ki, family.ConvertedRequest
    except (AttributeError, KeyError) as error:
        raise PluginError(f"this TileRT is none that is known: {error}", hint=_HINT) from error
    stub = config.engine == "stub"
    return TileRT(
        engine=interface.StubEngine() if stub else _engine(config, profile),
        latents=dequantised if config.kv_cache_dtype is KVDtype.FP8 else bfloat16_latents,
        keys=lambda pages, tokens: keys(pages, tokens, False),
        request=request,
        device=None if stub else "cuda:0",
    )


def bfloat16_latents(rows: Tensor, tokens: int) -> Tensor:
    """Of a cache that is not quantised."""
    return rows.view(torch.bfloat16).view(tokens, -1).clone()


def _engine(config: TileRTNodeConfig, profile: Any) -> Any:
    if config.weights_dir is None:
        hint = "`pdhub tilert convert` makes them; `engine: stub` needs none"
        raise ConfigError("TileRT needs its converted weights: set `weights_dir`", hint=hint)
    if not torch.cuda.is_available():
        hint = "`engine: stub` tries everything else"
        raise ConfigError("TileRT's kernels need eight B200; there is no CUDA device here", hint=hint)
    try:
        return profile.build_engine(
            model_weights_dir=config.weights_dir,
            max_seq_len=config.max_seq_len,
            with_mtp=config.mtp,
            ar_steps=AR_STEPS,
        )
    except Exception as error:
        hint = "`pdhub doctor` knows what its kernels need; `engine: stub` tries everything else"
        raise PluginError(f"TileRT's engine does not load: {error}", hint=hint) from error
