"""Attention over rows of different lengths, plugged into a Transformers model without changing it.

The model's forward hands keys and values to a cache and calls the attention function of its configuration with
what the cache returns. :class:`RowCache` writes them into the rows and returns *itself*; :func:`attend` then runs
one kernel a row over exactly that row's tokens. No padding, no mask, no gathered copy, and the same kernel and
shapes as a lone request: what a row computes cannot depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from pdhub_transformers.rows import Storage

NAME = "pdhub_rows"


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens of one request in a step: they stand at ``start`` and following positions of ``row``."""

    row: Storage
    start: int
    tokens: Sequence[int]

    def single(self) -> Iterator[Feed]:
        """The same tokens one by one."""
        for offset, token in enumerate(self.tokens):
            yield Feed(self.row, self.start + offset, (token,))


class RowCache(Cache):  # type: ignore[misc]
    """Cache of one forward pass; see the module's text.

    Args:
        feeds: what is computed.
        chunk: False: each token is a batch row of its own (``[rows, 1]``, decoding); True: a single feed is one
            sequence (``[1, tokens]``, prefill).
    """

    def __init__(self, feeds: Sequence[Feed], *, chunk: bool = False) -> None:
        # not calling the base class: it would keep per-layer tensors of its own, which rows replace
        self.layers: list[Any] = []
        self._writes: list[tuple[int, int, tuple[Tensor, ...]]] = []
        self._reads: list[tuple[Tensor, ...]] = []
        self._mask: Tensor | None = None
        self._causal = False
        at = 0
        for feed in feeds:
            kv, stop = feed.row.kv, feed.start + len(feed.tokens)
            target = kv[:, :, 0, :, feed.start : stop].flatten(0, 1).unbind(0)
            self._writes.append((at, at + len(feed.tokens), target))
            at += len(feed.tokens)
            for end in (stop,) if chunk else range(feed.start + 1, stop + 1):
                self._reads.append(kv[..., :end, :].flatten(0, 1).unbind(0))
        self._chunk = chunk
        if chunk and len(feeds[0].tokens) > 1:
            self._causal = feeds[0].start == 0
            if not self._causal:
                size = (len(feeds[0].tokens), stop)
                ones = torch.ones(size, dtype=torch.bool, device=feeds[0].row.kv.device)
                self._mask = ones.tril_(diagonal=feeds[0].start)

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store a layer's new keys and values; the attention function gets this cache and the layer's number."""
        for first, last, target in self._writes:
            if self._chunk:
                target[2 * layer].copy_(keys[0])
                target[2 * layer + 1].copy_(values[0])
            else:
                target[2 * layer].copy_(keys[first:last, :, 0].transpose(0, 1))
                target[2 * layer + 1].copy_(values[first:last, :, 0].transpose(0, 1))
        return self, layer

    def attend(self, query: Tensor, layer: int, scale: float | None, groups: int) -> Tensor:
        """Attention of all rows, ``[rows, head, tokens, dim]``."""
        k, v = 2 * layer, 2 * layer + 1
        if len(self._reads) > 1:
            parts = [
                sdpa(one, read[k], read[v], scale=scale, enable_gqa=groups > 1)
                for one, read in zip(query.split(1), self._reads, strict=True)
            ]
            return torch.cat(parts)
        key, value = self._reads[0][k], self._reads[0][v]
        if self._mask is not None and groups > 1:
            # fused kernels take grouped heads only without a mask
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
            groups = 1
        return sdpa(query, key, value, attn_mask=self._mask, is_causal=self._causal, scale=scale, enable_gqa=groups > 1)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Only asked by models that were given no positions, which never happens here."""
        return 0


def attend(
    module: torch.nn.Module,
    query: Tensor,
    cache: RowCache,
    layer: int,
    mask: None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function; see the module's text for what ``cache`` and ``layer`` are."""
    out = cache.attend(query, layer, scaling, getattr(module, "num_key_value_groups", 1))
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
