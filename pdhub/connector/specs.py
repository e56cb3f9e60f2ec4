"""Reads vLLM's description of its cache. Nothing of vLLM is imported: classes are known by their names, so that one
that a release lacks is no error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor

from pdhub.api.errors import ConfigError
from pdhub.api.layout import GroupKind
from pdhub.connector.gather import physical_of
from pdhub.connector.layouts import FP8_DS_MLA, FP8_DS_MLA_ROW, INDEXER_PAGE, INDEXER_TOKENS, Layer
from pdhub.connector.source import Cache

_NUMBER: Final = re.compile(r"(?:^|\.)(\d+)\.")
_FLOATS: Final = ("float32", "bfloat16", "float16")
_HINT: Final = "serve this model's pdhub pools from a prefill instance without such layers or options"


def layers_of(kv_cache_config: Any, tensors: Mapping[str, Tensor], *, ue8m0: bool) -> Iterator[tuple[Layer, Cache]]:
    """Every layer whose cache is handed over.

    Args:
        kv_cache_config: a worker's ``KVCacheConfig``.
        tensors: as ``register_kv_caches`` gets them.
        ue8m0: how indexer scales are encoded here.

    Raises:
        ConfigError: a cache that cannot be handed over.
    """
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue
        spec = group.kv_cache_spec
        each = getattr(spec, "kv_cache_specs", {})
        for name in group.layer_names:
            if name in tensors:  # a layer may share another one's
                yield _layer(name, index, each.get(name, spec), tensors[name], kv_cache_config.num_blocks, ue8m0)


def _layer(name: str, group: int, spec: Any, tensor: Tensor, blocks: int, ue8m0: bool) -> tuple[Layer, Cache]:
    number = _NUMBER.search(name)
    if number is None:
        raise ConfigError(f"{name}: a cache without a layer's number", hint=_HINT)
    base = {"name": name, "number": int(number[1]), "group": group, "block_tokens": int(spec.block_size)}
    kind = type(spec).__name__
    if kind == "MLAAttentionSpec":
        return _mla(base, spec, tensor, blocks, ue8m0)
    if kind in ("FullAttentionSpec", "SlidingWindowSpec"):
        return _attention(base, spec, tensor, blocks)
    raise ConfigError(f"{name}: a cache of kind {kind} cannot be handed over yet", hint=_HINT)


def _mla(base: dict[str, Any], spec: Any, tensor: Tensor, blocks: int, ue8m0: bool) -> tuple[Layer, Cache]:
    ratio, name, width = tensor.shape[0] // blocks, base["name"], tensor.shape[-1]
    row = width * tensor.itemsize
    dtype = _dtype(tensor)
    if "indexer" in name.split("."):
        if dtype != "uint8" or row * INDEXER_TOKENS != INDEXER_PAGE or base["block_tokens"] // ratio % INDEXER_TOKENS:
            raise ConfigError(f"{name}: an indexer cache of shape {tuple(tensor.shape)}, {dtype}", hint=_HINT)
        return Layer(**base, kind=GroupKind.INDEXER, heads=1, dim=width, dtype=dtype), Cache(tensor, ratio, ue8m0=ue8m0)
    if row == FP8_DS_MLA_ROW and dtype == "uint8":
        dtype = FP8_DS_MLA
    elif dtype not in _FLOATS:
        raise ConfigError(f"{name}: an MLA cache of {row} bytes a token, {dtype}", hint=_HINT)
    return Layer(**base, kind=GroupKind.MLA, heads=1, dim=width, dtype=dtype), Cache(tensor, ratio)


def _attention(base: dict[str, Any], spec: Any, tensor: Tensor, blocks: int) -> tuple[Layer, Cache]:
    name, dim, dtype, shape = base["name"], int(spec.head_size), _dtype(tensor), tuple(tensor.shape)
    if dtype not in _FLOATS:
        raise ConfigError(f"{name}: a cache of type {dtype}, whose scales are not handed over", hint=_HINT)
    if getattr(spec, "head_size_v", None) not in (None, dim) or getattr(spec, "attention_chunk_size", None):
        raise ConfigError(f"{name}: keys and values of different size, or chunked attention", hint=_HINT)
    count = shape[1] if len(shape) == 5 and shape[0] == 2 else shape[0]
    ratio = max(1, count // blocks)
    try:
        physical = physical_of(shape, blocks * ratio, cpu=tensor.device.type == "cpu")
    except ValueError as error:
        raise ConfigError(f"{name}: {error}", hint=_HINT) from error
    window = int(getattr(spec, "sliding_window", None) or 0)
    kind = GroupKind.SLIDING if window else GroupKind.FULL
    layer = Layer(**base, kind=kind, heads=int(spec.num_kv_heads), dim=dim, dtype=dtype, window=window)
    return layer, Cache(tensor, ratio, physical)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
