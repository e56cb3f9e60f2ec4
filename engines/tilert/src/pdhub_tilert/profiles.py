"""TileRT's model profiles: layers, versions of the KV layout, bytes. Of TileRT 0.1.6."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PAGE: Final = 64
"""Tokens of a page of the indexer's keys; vLLM's block size has to be the same."""

KI_PAGE_BYTES: Final = 8448
"""64 rows of 128 e4m3 values, then 64 float32 scales."""


class Profile(StrEnum):
    """What `--model` of the decode server and `tilert_model` of the connector say."""

    GLM5 = "glm5"
    GLM5_2 = "glm5_2"
    DSV32 = "dsv32"


class KVDtype(StrEnum):
    """MLA cache of the prefill instance. ``FP8``: 528 + 128 bytes a token and layer; ``BF16``: 1024 + 128."""

    FP8 = "fp8_ds_mla"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class Shape:
    """Args:
    layers: with KV, the draft layer included. base_version: of the layout, with an fp8 cache.
    top_k: the engine applies ``top_k`` (up to :data:`TOP_K_MOST`).
    shared_indexers: of four layers one has an indexer, whose choice the next three use too.
    """

    layers: int
    base_version: int
    draft_layer: bool
    top_k: bool = True
    shared_indexers: bool = False


SHAPES: Final = {
    Profile.GLM5: Shape(79, 10, draft_layer=True),
    Profile.GLM5_2: Shape(79, 12, draft_layer=True, top_k=False, shared_indexers=True),
    Profile.DSV32: Shape(61, 11, draft_layer=False),
}

TOP_K_MOST: Final = 255
"""The kernels choose among 256 candidates; a wider ``top_k`` is ignored there."""


def layers(profile: Profile, mtp: bool) -> int:
    """Layers with KV. Only GLM-5 can leave its draft layer out."""
    shape = SHAPES[profile]
    return shape.layers - (profile is Profile.GLM5 and not mtp)


def indexers(profile: Profile, mtp: bool) -> tuple[tuple[int, ...], ...]:
    """Layers that have an indexer of their own, by preference: where they are few, the draft layer may have none."""
    count = layers(profile, mtp)
    if not SHAPES[profile].shared_indexers:
        return (tuple(range(count)),)
    draft = count - 1
    own = tuple(n for n in range(draft) if max(n - 2, 0) % 4 == 0)
    return (*own, draft), own


def layout_version(profile: Profile, dtype: KVDtype, mtp: bool) -> int:
    """What both ends compare before KV moves (CUDA; ROCm adds to it)."""
    base = SHAPES[profile].base_version
    if profile is Profile.GLM5 and not mtp:
        base = 1010
    return base + (0 if dtype is KVDtype.FP8 else 40)


def kv_bytes(profile: Profile, dtype: KVDtype, mtp: bool, tokens: int) -> int:
    """Bytes that a prompt of so many tokens writes: two planes by token, one by page."""
    row = (528 if dtype is KVDtype.FP8 else 1024) + 128
    pages = -(-tokens // PAGE)
    return layers(profile, mtp) * (tokens * row + pages * KI_PAGE_BYTES)
