"""Multi-head latent attention (DeepSeek-V3): rows of latents, and the model's attention over them.

The model keeps one latent and one rotated key a token and layer in its cache and expands them to keys and values of all
heads when it attends. Rows store exactly that. A decode step expands a row's whole context, so rows are computed one
after another.

On the wire a token's row is the latent, then the rotated key with its pairs side by side, as vLLM keeps it;
Transformers puts the first halves of all pairs before the second ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from pdhub.api import GroupKind, KVGroup, KVLayout
from pdhub_transformers.attention import Feed
from pdhub_transformers.rows import typed

NAME = "pdhub_latent_rows"


@dataclass(frozen=True, slots=True)
class LatentGeometry:
    """Shape of a model's latent cache.

    Args:
        rank: width of a latent. rotary: width of the rotated key.
        drafts: layers for multi-token prediction that prefill may write too; nothing here reads them.
    """

    layers: int
    rank: int
    rotary: int
    dtype: torch.dtype
    device: torch.device
    block_tokens: int
    drafts: int = 0

    @property
    def width(self) -> int:
        return self.rank + self.rotary

    def rounded(self, tokens: int) -> int:
        """Tokens, rounded up to whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    def layout(self, model: str) -> KVLayout:
        """The landing layout: one group of latents, block-major."""
        group = KVGroup(
            name="kv",
            kind=GroupKind.MLA,
            layers=tuple(range(self.layers)),
            block_tokens=self.block_tokens,
            block_bytes=self.block_tokens * self.width * self.dtype.itemsize,
            axes=(f"token:{self.block_tokens}", f"dim:{self.width}"),
            dtype=str(self.dtype).removeprefix("torch."),
        )
        return KVLayout(model=model, version=1, shards=1, groups=(group,))

    def accepts(self, model: str) -> tuple[KVLayout, ...]:
        """Layouts that a row can be loaded from, best first: without and with the draft layers."""
        own = self.layout(model)
        if not self.drafts:
            return (own,)
        layers = tuple(range(self.layers + self.drafts))
        return own, replace(own, groups=(replace(own.groups[0], layers=layers),))

    def row(self, tokens: int) -> LatentRow:
        """Storage for one request."""
        return LatentRow(self, tokens)


class LatentRow:
    """Latents of one request: ``[layer, token, rank + rotary]``, whole blocks long. Not cleared, as :class:`Row`."""

    def __init__(self, geometry: LatentGeometry, tokens: int) -> None:
        self.geometry = geometry
        self.tokens = geometry.rounded(tokens)
        self.kv = torch.empty(
            (geometry.layers, self.tokens, geometry.width), dtype=geometry.dtype, device=geometry.device
        )

    def load(self, shards: Sequence[Tensor], tokens: int, layout: KVLayout) -> None:
        """See :class:`pdhub_transformers.rows.Storage`."""
        g, layers = self.geometry, len(layout.groups[0].layers)
        shape = torch.Size((-(-tokens // g.block_tokens), layers, g.block_tokens, g.width))
        wire = typed(shards[0], g.dtype, shape)
        mine = self._blocks(0, shape[0])
        mine[..., : g.rank].copy_(wire[:, : g.layers, :, : g.rank])
        self._halves(mine).copy_(wire[:, : g.layers, :, g.rank :].unflatten(-1, (g.rotary // 2, 2)))

    def store(self, view: memoryview, start: int, stop: int) -> None:
        """See :class:`pdhub_transformers.rows.Storage`."""
        g = self.geometry
        count = -(-(stop - start) // g.block_tokens)
        self.kv[:, stop : start + count * g.block_tokens] = 0
        mine = self._blocks(start, count)
        wire = torch.frombuffer(view, dtype=g.dtype, count=mine.numel()).view(mine.shape)
        wire[..., : g.rank].copy_(mine[..., : g.rank])
        wire[..., g.rank :].unflatten(-1, (g.rotary // 2, 2)).copy_(self._halves(mine))

    def _blocks(self, start: int, count: int) -> Tensor:
        """View ``[block, layer, token, width]``."""
        size = self.geometry.block_tokens
        return self.kv[:, start : start + count * size].unflatten(1, (count, size)).transpose(0, 1)

    def _halves(self, blocks: Tensor) -> Tensor:
        """The rotated keys as the wire's pairs: ``[…, rotary / 2, 2]``."""
        g = self.geometry
        return blocks[..., g.rank :].unflatten(-1, (2, g.rotary // 2)).transpose(-1, -2)


class LatentCache(Cache):  # type: ignore[misc]
    """Cache of one forward pass over one row."""

    def __init__(self, feeds: Sequence[Feed], *, chunk: bool = False) -> None:
        # not calling the base class: it would keep per-layer tensors of its own, which rows replace
        self.layers: list[Any] = []
        (feed,) = feeds
        row: Any = feed.row
        self._kv, self._rank = row.kv, row.geometry.rank
        self._start, self._stop = feed.start, feed.start + len(feed.tokens)

    def update(self, latents: Tensor, rotated: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store a layer's new latents and rotated keys, ``[1, 1, tokens, …]``; those of the whole row come back."""
        kv = self._kv[layer]
        kv[self._start : self._stop, : self._rank].copy_(latents[0, 0])
        kv[self._start : self._stop, self._rank :].copy_(rotated[0, 0])
        whole = kv[None, None, : self._stop]
        return whole[..., : self._rank], whole[..., self._rank :]

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Only asked by models that were given no positions, which never happens here."""
        return 0


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of the last tokens over all of them, ``[1, head, tokens, dim]``."""
    new, whole = query.shape[2], key.shape[2]
    ones = None
    if 1 < new < whole:
        ones = torch.ones((new, whole), dtype=torch.bool, device=query.device).tril_(diagonal=whole - new)
    out = sdpa(query, key, value, attn_mask=ones, is_causal=new == whole and new > 1, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
