"""KV storage of one request, and the two permutations between it and a landing's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pdhub.api import GroupKind, KVGroup, KVLayout


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a model's KV cache."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    block_tokens: int

    @property
    def token_bytes(self) -> int:
        return int(self.layers * 2 * self.heads * self.dim * self.dtype.itemsize)

    def rounded(self, tokens: int) -> int:
        """Tokens, rounded up to whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    def layout(self, model: str) -> KVLayout:
        """The landing layout: one full-attention group, block-major."""
        group = KVGroup(
            name="kv",
            kind=GroupKind.FULL,
            layers=tuple(range(self.layers)),
            block_tokens=self.block_tokens,
            block_bytes=2 * self.heads * self.block_tokens * self.dim * self.dtype.itemsize,
            axes=("kv:2", f"head:{self.heads}", f"token:{self.block_tokens}", f"dim:{self.dim}"),
            dtype=str(self.dtype).removeprefix("torch."),
        )
        return KVLayout(model=model, version=1, shards=1, groups=(group,))

    def accepts(self, model: str) -> tuple[KVLayout, ...]:
        """Layouts that a row can be loaded from, best first: whole, or cut by heads as tensor parallelism does."""
        own = self.layout(model)
        (group,) = own.groups
        found = []
        for shards in (n for n in range(1, self.heads + 1) if self.heads % n == 0):
            axes = ("kv:2", f"head:{self.heads // shards}", *group.axes[2:])
            cut = replace(group, block_bytes=group.block_bytes // shards, axes=axes)
            found.append(replace(own, shards=shards, groups=(cut,)))
        return tuple(found)

    def row(self, tokens: int) -> Row:
        """Storage for one request."""
        return Row(self, tokens)


class Storage(Protocol):
    """KV of one request, whatever the model keeps of it."""

    kv: Tensor

    def load(self, shards: Sequence[Tensor], tokens: int, layout: KVLayout) -> None:
        """Copy the first ``tokens`` tokens out of a landing.

        Args:
            shards: the landing's bytes, uint8, one flat tensor a shard, on any device.
            layout: one that the geometry accepts.
        """

    def store(self, view: memoryview, start: int, stop: int) -> None:
        """Copy the blocks of tokens ``start`` (on a block border) to ``stop`` to the front of ``view``; the rest of
        the last block becomes zero."""


class Row:
    """Keys and values of one request: ``[layer, kv, 1, head, token, dim]``, whole blocks long.

    The memory is not cleared: a reader never looks beyond the tokens that were written for this request.
    """

    def __init__(self, geometry: Geometry, tokens: int) -> None:
        self.geometry = geometry
        self.tokens = geometry.rounded(tokens)
        shape = (geometry.layers, 2, 1, geometry.heads, self.tokens, geometry.dim)
        self.kv = torch.empty(shape, dtype=geometry.dtype, device=geometry.device)

    def _blocks(self, start: int, count: int) -> Tensor:
        """View ``[block, layer, kv, head, token, dim]``: the order of a block-major landing."""
        g = self.geometry
        part = self.kv[:, :, 0, :, start : start + count * g.block_tokens]
        return part.view(g.layers, 2, g.heads, count, g.block_tokens, g.dim).permute(3, 0, 1, 2, 4, 5)

    def load(self, shards: Sequence[Tensor], tokens: int, layout: KVLayout) -> None:
        """See :class:`Storage`."""
        blocks = self._blocks(0, -(-tokens // self.geometry.block_tokens))
        for shard, part in zip(shards, blocks.chunk(layout.shards, dim=3), strict=True):
            part.copy_(typed(shard, part.dtype, part.shape))

    def store(self, view: memoryview, start: int, stop: int) -> None:
        """See :class:`Storage`."""
        count = -(-(stop - start) // self.geometry.block_tokens)
        self.kv[..., stop : start + count * self.geometry.block_tokens, :] = 0
        blocks = self._blocks(start, count)
        typed(torch.frombuffer(view, dtype=torch.uint8), blocks.dtype, blocks.shape).copy_(blocks)


def typed(data: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """The front of flat bytes as values; a view."""
    return data[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
