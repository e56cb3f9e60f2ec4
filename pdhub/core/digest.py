"""A digest over handed-over KV, for verify mode: sender and node compute it over what they each see.

Every block counts with its place (group, layer, block), so a block that landed elsewhere changes the digest. The
blocks' own digests are added up, so the sum can be built chunk by chunk in any order, without keeping the prompt.
It finds faults; it does not stop an attacker.
"""

from __future__ import annotations

import hashlib
import struct

from pdhub.api.layout import KVLayout, Order

_BYTES = 16
_MASK = (1 << (8 * _BYTES)) - 1
_PLACE = struct.Struct("<III")


class KVDigest:
    """The digest of one shard's blocks, built as they come. Each block must be added exactly once.

    Args:
        layout: the landing's layout.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._sum = 0

    def add(self, index: int, layer: int, block: int, data: memoryview | bytes) -> None:
        """Add one block.

        Args:
            index, layer, block: its place, as in :meth:`KVLayout.block_offset`.
            data: its ``block_bytes`` bytes, padding included.
        """
        place = _PLACE.pack(index, layer, block)
        own = hashlib.blake2b(data, digest_size=_BYTES, key=place).digest()
        self._sum = (self._sum + int.from_bytes(own, "little")) & _MASK

    def add_blocks(self, index: int, first: int, count: int, data: memoryview) -> None:
        """Add the blocks ``first`` to ``first + count`` of a group, over all its layers.

        Args:
            data: starts with those blocks in the layout's order, as a :class:`~pdhub.api.prefill.KVChunk` has them.
        """
        group = self._layout.groups[index]
        layers = len(group.layers)
        for layer in range(layers):
            for i in range(count):
                cell = i * layers + layer if self._layout.order is Order.BLOCK_MAJOR else layer * count + i
                start = cell * group.block_bytes
                self.add(index, layer, first + i, data[start : start + group.block_bytes])

    def hexdigest(self) -> str:
        """32 hex digits over everything that was added."""
        return self._sum.to_bytes(_BYTES, "little").hex()


def landing_digest(region_view: memoryview, layout: KVLayout, capacity_tokens: int, tokens: int) -> str:
    """Digest of every block that a prompt needs, read out of a landing: equals the sender's :class:`KVDigest`.

    Args:
        region_view: one shard's region.
        capacity_tokens: the landing's capacity, which fixes the block offsets.
        tokens: of the prompt.
    """
    digest = KVDigest(layout)
    for index, group in enumerate(layout.groups):
        for layer in range(len(group.layers)):
            for block in range(group.blocks(tokens)):
                start = layout.block_offset(index, layer, block, capacity_tokens)
                digest.add(index, layer, block, region_view[start : start + group.block_bytes])
    return digest.hexdigest()
