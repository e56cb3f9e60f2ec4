"""KV layouts by name, for measurements: what real models put on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pdhub.api.errors import ConfigError
from pdhub.api.layout import GroupKind, KVGroup, KVLayout, Order

BLOCK: Final = 16
"""vLLM's usual tokens a block; DeepSeek's kernels take 64."""


def _attention(layers: int, heads: int, dim: int, bytes_each: int = 2) -> tuple[KVGroup, ...]:
    dtype = "bfloat16" if bytes_each == 2 else "float32"
    axes = ("kv:2", f"head:{heads}", f"token:{BLOCK}", f"dim:{dim}")
    size = 2 * heads * BLOCK * dim * bytes_each
    return (KVGroup("attention", GroupKind.FULL, tuple(range(layers)), BLOCK, size, axes, dtype),)


def _latent(layers: int, row_bytes: int, dtype: str) -> KVGroup:
    return KVGroup("latent", GroupKind.MLA, tuple(range(layers)), 64, 64 * row_bytes, ("token:64", "row"), dtype)


def _indexer(layers: int) -> KVGroup:
    return KVGroup("indexer", GroupKind.INDEXER, tuple(range(layers)), 64, 8448, ("planar",), "fp8+scale")


PRESETS: Final[Mapping[str, tuple[KVGroup, ...]]] = {
    "smollm2-135m": _attention(30, 3, 64),
    "llama-3.2-1b": _attention(16, 8, 64),
    "llama-3.1-8b": _attention(32, 8, 128),
    "llama-3.1-70b": _attention(80, 8, 128),
    "qwen3-8b": _attention(36, 8, 128),
    "deepseek-v3": (_latent(61, 576 * 2, "bfloat16"),),
    "deepseek-v3.2": (_latent(61, 656, "fp8_ds_mla"), _indexer(61)),
}

_CUSTOM: Final = "custom:"
_MEMBERS: Final = ("layers", "block_tokens", "block_bytes")


def layout(name: str, order: Order = Order.BLOCK_MAJOR) -> KVLayout:
    """A preset, or ``custom:layers=32,block_tokens=16,block_bytes=65536``. Raises ConfigError."""
    groups = _custom(name) if name.startswith(_CUSTOM) else PRESETS.get(name)
    if groups is None:
        hint = f"there are: {', '.join(PRESETS)}, custom:layers=32,block_tokens=16,block_bytes=65536"
        raise ConfigError(f"there is no layout '{name}'", where="--layout", hint=hint)
    return KVLayout(name, 1, 1, groups, order)


def _custom(name: str) -> tuple[KVGroup, ...]:
    words = dict(word.partition("=")[::2] for word in name.removeprefix(_CUSTOM).split(","))
    if set(words) != set(_MEMBERS) or not all(text.isdecimal() and int(text) > 0 for text in words.values()):
        raise ConfigError(f"'{name}' needs {', '.join(_MEMBERS)}, each a positive whole number", where="--layout")
    layers, tokens, size = (int(words[member]) for member in _MEMBERS)
    return (KVGroup("custom", GroupKind.FULL, tuple(range(layers)), tokens, size, (), "bytes"),)
