"""From what vLLM says of its cache to the layout of the bytes that leave it. Arithmetic only: no torch, no vLLM.

On the wire every kind has one form, whatever vLLM's backend does inside:

======== ================================================ =========================================
kind     one block of one layer                           dtype
======== ================================================ =========================================
full     ``[kv 2][head][token][dim]``                     of the cache
sliding  as full, with its window                         of the cache
mla      ``[token][dim]``, latent then rotary part        of the cache
mla      ``[token][byte 656]``                            ``fp8_ds_mla``
indexer  64 × 128 e4m3 values, then 64 float32 scales     ``fp8_e4m3_scale_f32``
======== ================================================ =========================================

Heads are those of one shard. Tokens after the prompt's last are zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import lcm
from typing import Final

from pdhub.api.errors import ConfigError
from pdhub.api.layout import GroupKind, KVGroup, KVLayout

FP8_DS_MLA: Final = "fp8_ds_mla"
FP8_DS_MLA_ROW: Final = 656
INDEXER: Final = "fp8_e4m3_scale_f32"
INDEXER_TOKENS: Final = 64
INDEXER_PAGE: Final = 8448
INDEXER_VALUES: Final = 8192

ITEMSIZE: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's cache, as vLLM describes it.

    Args:
        name: vLLM's name of the layer.
        number: the model's layer number; draft layers count on.
        group: which of vLLM's KV cache groups its block ids are in.
        block_tokens: of that group's blocks.
        heads, dim: of this shard; ``dim`` is the row of an ``mla`` layer, in elements.
        window: tokens that a ``sliding`` layer keeps.
        part: which bytes of an ``mla`` row go out; None = all.
    """

    name: str
    number: int
    group: int
    kind: GroupKind
    block_tokens: int
    heads: int
    dim: int
    dtype: str
    window: int = 0
    part: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """``layers[i]`` are the layers of ``layout.groups[i]``, in its order. A shard may have fewer than the group has
    places for; the last ones are then zero."""

    layout: KVLayout
    layers: tuple[tuple[Layer, ...], ...]

    @property
    def align(self) -> int:
        """Tokens by which a prompt may be cut."""
        return lcm(*(group.block_tokens for group in self.layout.groups))

    @property
    def window(self) -> int:
        """The shortest window of a sliding group; 0 = none."""
        return min((group.window for group in self.layout.groups if group.window), default=0)


def plan(layers: Iterable[Layer], *, model: str, shards: int, block_tokens: int) -> Plan:
    """The layout of a cache.

    Args:
        model: as :attr:`KVLayout.model`. shards: writers that hold different heads.
        block_tokens: tokens of a block on the wire; vLLM's own may be any other number.

    Raises:
        ConfigError: a layer occurs twice, or its bytes have no form on the wire.
    """
    ordered = sorted(layers, key=lambda layer: (_rank(layer), layer.number))
    groups: list[KVGroup] = []
    members: list[tuple[Layer, ...]] = []
    for _, found in groupby(ordered, key=_rank):
        same = tuple(found)
        numbers = tuple(layer.number for layer in same)
        if len(set(numbers)) != len(numbers):
            twice = ", ".join(layer.name for layer in same if numbers.count(layer.number) > 1)
            raise ConfigError(f"several caches of one layer: {twice}", where="kv_transfer_config")
        groups.append(_group(same[0], numbers, block_tokens, groups))
        members.append(same)
    if not groups:
        raise ConfigError("this model has no KV cache", where="kv_transfer_config")
    return Plan(KVLayout(model, 1, shards, tuple(groups)), tuple(members))


def _rank(layer: Layer) -> tuple[int, int, int, int, str]:
    """Layers with equal ranks form a group; groups come in the order of their ranks."""
    kinds = (GroupKind.FULL, GroupKind.MLA, GroupKind.SLIDING, GroupKind.INDEXER)
    if layer.kind not in kinds:
        raise ConfigError(f"{layer.name}: a cache of kind '{layer.kind}' cannot be handed over yet")
    return kinds.index(layer.kind), layer.window, layer.heads, layer.dim, layer.dtype


def _group(layer: Layer, numbers: tuple[int, ...], tokens: int, before: Sequence[KVGroup]) -> KVGroup:
    kind = layer.kind
    base = {GroupKind.SLIDING: f"sliding{layer.window}", GroupKind.INDEXER: "indexer"}.get(kind, "kv")
    taken = sum(group.name.split("-")[0] == base for group in before)
    name = f"{base}-{taken}" if taken else base
    if kind is GroupKind.INDEXER:
        if layer.block_tokens % INDEXER_TOKENS:
            raise ConfigError(
                f"{layer.name}: blocks of {layer.block_tokens} tokens",
                hint=f"run vLLM with --block-size {INDEXER_TOKENS}",
            )
        return KVGroup(name, kind, numbers, INDEXER_TOKENS, INDEXER_PAGE, (f"byte:{INDEXER_PAGE}",), INDEXER)
    if layer.dtype == FP8_DS_MLA:
        axes: tuple[str, ...] = (f"token:{tokens}", f"byte:{FP8_DS_MLA_ROW}")
        return KVGroup(name, kind, numbers, tokens, tokens * FP8_DS_MLA_ROW, axes, FP8_DS_MLA)
    size = ITEMSIZE.get(layer.dtype)
    if size is None:
        raise ConfigError(f"{layer.name}: a cache of type {layer.dtype} has no form on the wire")
    if kind is GroupKind.MLA:
        axes = (f"token:{tokens}", f"dim:{layer.dim}")
        return KVGroup(name, kind, numbers, tokens, tokens * layer.dim * size, axes, layer.dtype)
    axes = ("kv:2", f"head:{layer.heads}", f"token:{tokens}", f"dim:{layer.dim}")
    nbytes = 2 * layer.heads * tokens * layer.dim * size
    return KVGroup(name, kind, numbers, tokens, nbytes, axes, layer.dtype, layer.window)


def piece_tokens(plan: Plan, wanted: int, staging_bytes: int, slots: int = 4) -> int:
    """Tokens of the largest piece so that ``slots`` pieces fit into the staging memory: at most ``wanted``, a multiple
    of the alignment, and at least that."""
    unit = plan.layout.landing_bytes(plan.align)
    return plan.align * max(1, min(wanted // plan.align, staging_bytes // (slots * unit)))
