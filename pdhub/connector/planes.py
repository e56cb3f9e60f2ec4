"""A latent cache as planes, the form in which TileRT takes it. Arithmetic only: no torch, no vLLM.

===== ======== ============================================================ ======================
group kind     64 tokens of one layer                                       dtype
===== ======== ============================================================ ======================
kv    mla      ``[token][byte 528]``: 512 e4m3 values, 4 float32 scales     ``fp8_ds_mla``
kv    mla      ``[token][512]``                                             ``bfloat16``
pe    mla      ``[token][64]``: the rotary part                             ``bfloat16``
ki    indexer  64 × 128 e4m3 values, then 64 float32 scales                 ``fp8_e4m3_scale_f32``
===== ======== ============================================================ ======================

Layer-major: a layer's plane is contiguous over the whole prompt. A layer that has no indexer of its own has the pages
of the last one before it that has; which ones have is part of the layout.

Layers are dealt out to shards like cards: layer ``n`` is in shard ``n % shards``, at place ``n // shards``. So a
group's ``layers`` are those of the first shard, and every shard has as many places; one without a last layer leaves
that place zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from pdhub.api.errors import ConfigError
from pdhub.api.layout import GroupKind, KVGroup, KVLayout, Order
from pdhub.connector.layouts import (
    FP8_DS_MLA,
    FP8_DS_MLA_ROW,
    INDEXER,
    INDEXER_PAGE,
    INDEXER_TOKENS,
    ITEMSIZE,
    Layer,
    Plan,
)

ROTARY_BYTES: Final = 128
ROTARY: Final = "bfloat16"
_WHERE: Final = "kv_transfer_config"


def plan_planes(layers: Iterable[Layer], *, model: str, shards: int, shard: int) -> Plan:
    """What one shard's worker writes.

    Args:
        layers: all of the model's, with their indexers.
        model: as :attr:`KVLayout.model`. shard: which of the ``shards`` this is.

    Raises:
        ConfigError: the model has no latent cache with an indexer, or one of another shape.
    """
    mla, indexers = [], {}
    for layer in layers:
        if layer.kind is GroupKind.INDEXER:
            indexers[layer.number] = layer
        elif layer.kind is GroupKind.MLA:
            mla.append(layer)
        else:
            raise ConfigError(f"{layer.name}: a cache of kind '{layer.kind}' has no planes", where=_WHERE)
    mla.sort(key=lambda layer: layer.number)
    if [layer.number for layer in mla] != list(range(len(mla))) or 0 not in indexers:
        raise ConfigError("planes need every layer's latent cache and the first one's indexer", where=_WHERE)
    row, dtype = _row(mla)
    if any(layer.block_tokens % INDEXER_TOKENS for layer in indexers.values()):
        raise ConfigError("blocks of other than 64 tokens", where=_WHERE, hint="run vLLM with --block-size 64")
    cut = row - ROTARY_BYTES
    parts = (
        [replace(layer, part=(0, cut)) for layer in mla],
        [replace(layer, part=(cut, row)) for layer in mla],
        _filled(indexers, len(mla)),
    )
    own = sorted(number for number in indexers if number < len(mla))
    layout = layout_of(len(mla), own, cut, dtype, model=model, shards=shards)
    return Plan(layout, tuple(tuple(part[shard::shards]) for part in parts))


def layout_of(count: int, own: Sequence[int], latent_bytes: int, dtype: str, *, model: str, shards: int) -> KVLayout:
    """Args:
    count: layers. own: those that have an indexer. latent_bytes: of a token in plane ``kv``; dtype: its type.
    """
    places = tuple(range(count))[::shards]
    page: tuple[str, ...] = (f"byte:{INDEXER_PAGE}",)
    if len(own) < count:
        page += ("own:" + ".".join(map(str, own)),)
    size, tokens = ITEMSIZE.get(dtype, 1), INDEXER_TOKENS
    axes = (f"token:{tokens}", f"byte:{latent_bytes}" if size == 1 else f"dim:{latent_bytes // size}")
    pe_axes = (f"token:{tokens}", f"dim:{ROTARY_BYTES // ITEMSIZE[ROTARY]}")
    groups = (
        KVGroup("kv", GroupKind.MLA, places, tokens, tokens * latent_bytes, axes, dtype),
        KVGroup("pe", GroupKind.MLA, places, tokens, tokens * ROTARY_BYTES, pe_axes, ROTARY),
        KVGroup("ki", GroupKind.INDEXER, places, tokens, INDEXER_PAGE, page, INDEXER),
    )
    return KVLayout(model, 1, shards, groups, Order.LAYER_MAJOR)


def _row(mla: Sequence[Layer]) -> tuple[int, str]:
    """Bytes of a cache's row, and the type of its latent part."""
    kinds = {(layer.dtype, layer.dim) for layer in mla}
    if kinds == {(FP8_DS_MLA, FP8_DS_MLA_ROW)}:
        return FP8_DS_MLA_ROW, FP8_DS_MLA
    if kinds == {(ROTARY, 576)}:
        return 1152, ROTARY
    hint = "run vLLM with --kv-cache-dtype fp8_ds_mla, or in bfloat16"
    raise ConfigError(f"latent caches of {sorted(kinds)} have no planes", where=_WHERE, hint=hint)


def _filled(indexers: dict[int, Layer], count: int) -> list[Layer]:
    out, last = [], indexers[0]
    for number in range(count):
        last = indexers.get(number, last)
        out.append(last)
    return out
