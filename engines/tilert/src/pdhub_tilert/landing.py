"""A landing's memory: where it is allocated, and its planes as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdhub.api import KVLayout, Transport
from pdhub_tilert.planes import KI, KV, PE, place_of
from pdhub_tilert.profiles import KI_PAGE_BYTES, PAGE


def devices(transport: Transport, shards: int) -> tuple[str, ...]:
    """Where each shard of a landing is allocated: on GPUs in turn if there are any and the transport reaches them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count or not transport.reaches("cuda:0"):
        return ("cpu",) * shards
    return tuple(f"cuda:{shard % count}" for shard in range(shards))


class Planes:
    """Views into a landing.

    Args:
        shards: the bytes of each, in order. capacity: tokens of the landing.
    """

    def __init__(self, shards: Sequence[Tensor], layout: KVLayout, capacity: int) -> None:
        self._shards, self._layout, self._capacity = shards, layout, capacity

    def of(self, layer: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's bytes: latents ``[tokens, 528 | 1024]``, rotary parts ``[tokens, 128]``, index keys
        ``[pages, 8448]``."""
        row = self._layout.groups[KV].block_bytes // PAGE
        kv = self._plane(KV, layer, tokens * row).view(tokens, row)
        pe = self._plane(PE, layer, tokens * self._layout.groups[PE].block_bytes // PAGE).view(tokens, -1)
        pages = -(-tokens // PAGE)
        return kv, pe, self._plane(KI, layer, pages * KI_PAGE_BYTES).view(pages, KI_PAGE_BYTES)

    def _plane(self, group: int, layer: int, nbytes: int) -> Tensor:
        shard, place = place_of(self._layout, layer)
        start = self._layout.block_offset(group, place, 0, self._capacity)
        return self._shards[shard][start : start + nbytes]
