"""The KV layout of a hosted node: TileRT's planes. Arithmetic only: no torch.

In each shard's region, for a landing of ``S`` tokens (a multiple of 64) and ``n`` layers a shard, one after another:

===== ======================= ==========================================================================
plane bytes                   a layer's part
===== ======================= ==========================================================================
kv    ``n × S × 528``         a token's latent: 512 e4m3 values, 4 float32 scales; or 512 bfloat16 (1,024)
pe    ``n × S × 128``         a token's rotary part: 64 bfloat16 values
ki    ``n × S / 64 × 8448``   64 tokens' index keys: 64 × 128 e4m3 values, then 64 float32 scales
===== ======================= ==========================================================================

That is the receive buffer of TileRT's own server with ``--max-seq-len S``. Layer ``l`` is in shard ``l % shards``, at
place ``l // shards``. A layer without an indexer has the pages of the last one before it that has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdhub.api import GroupKind, KVGroup, KVLayout, Order
from pdhub_tilert.config import TileRTNodeConfig
from pdhub_tilert.profiles import KI_PAGE_BYTES, PAGE, KVDtype, indexers, layers

KV, PE, KI = 0, 1, 2
"""Which group of the layout is which plane."""

PE_BYTES: Final = 128
LATENT: Final = 512
LATENT_BYTES: Final = {KVDtype.FP8: 528, KVDtype.BF16: 1024}


def layouts(config: TileRTNodeConfig, model: str) -> tuple[KVLayout, ...]:
    """What a node takes, best first.

    Args:
        model: as :attr:`KVLayout.model`.
    """
    return tuple(_layout(config, own, model) for own in indexers(config.profile, config.mtp))


def rounded(tokens: int) -> int:
    """Tokens of a landing for so many: whole pages."""
    return -(-tokens // PAGE) * PAGE


def place_of(layout: KVLayout, layer: int) -> tuple[int, int]:
    """Shard and place in it of a layer."""
    return layer % layout.shards, layer // layout.shards


def _layout(config: TileRTNodeConfig, own: Sequence[int], model: str) -> KVLayout:
    count = layers(config.profile, config.mtp)
    places = tuple(range(count))[:: config.shards]
    page: tuple[str, ...] = (f"byte:{KI_PAGE_BYTES}",)
    if len(own) < count:
        page += ("own:" + ".".join(map(str, own)),)
    latent = LATENT_BYTES[config.kv_cache_dtype]
    fp8 = config.kv_cache_dtype is KVDtype.FP8
    axes = (f"token:{PAGE}", f"byte:{latent}" if fp8 else f"dim:{LATENT}")
    groups = (
        KVGroup("kv", GroupKind.MLA, places, PAGE, PAGE * latent, axes, "fp8_ds_mla" if fp8 else "bfloat16"),
        KVGroup("pe", GroupKind.MLA, places, PAGE, PAGE * PE_BYTES, (f"token:{PAGE}", "dim:64"), "bfloat16"),
        KVGroup("ki", GroupKind.INDEXER, places, PAGE, KI_PAGE_BYTES, page, "fp8_e4m3_scale_f32"),
    )
    return KVLayout(model, 1, config.shards, groups, Order.LAYER_MAJOR)
