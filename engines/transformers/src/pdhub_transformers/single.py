"""Attention of one new token of one request, for CUDA graphs: where the row is and how long are read on the device.

A graph has fixed launches and addresses. These kernels get the row's address and the token's position from a tensor,
so one graph serves every row and every length. The row is cut into as many parts as keep the device busy; parts behind
its end find nothing to do.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from transformers.cache_utils import Cache

from pdhub_transformers.rows import Geometry

PROGRAMS = 256
"""Parts of the attention of a layer, about two for each multiprocessor."""

BLOCK = 64
"""Tokens that a part reads at a time."""


class SingleCache(Cache):  # type: ignore[misc]
    """Cache of a forward pass over one token.

    Args:
        where: int64 on the device: address of the row's first value, position of the token.
        tokens: length of the rows' memory.
    """

    def __init__(self, geometry: Geometry, where: Tensor, tokens: int) -> None:
        # not calling the base class: it would keep per-layer tensors of its own, which rows replace
        self.layers: list[Any] = []
        if geometry.dim < 16 or geometry.dim & (geometry.dim - 1):
            raise ValueError(f"heads of {geometry.dim} values are not supported by this kernel")
        self._where, self._tokens = where, tokens
        self._new: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The attention function gets this cache and the layer's number; it stores the values too."""
        self._new = keys, values
        return self, layer

    def attend(self, query: Tensor, layer: int, scale: float | None, groups: int) -> Tensor:
        """``[1, head, 1, dim]``."""
        assert self._new is not None, "update comes first"
        keys, values = self._new
        scale = scale if scale is not None else query.shape[-1] ** -0.5
        return attend_one(query, keys, values, self._where, layer, self._tokens, scale)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Only asked by models that were given no positions, which never happens here."""
        return 0


@torch.library.custom_op("pdhub_transformers::attend_one", mutates_args=())
def attend_one(
    query: Tensor, keys: Tensor, values: Tensor, where: Tensor, layer: int, tokens: int, scale: float
) -> Tensor:
    """Store a token's key and value in its row, then attend over the row.

    The row is memory that no other operation of a model sees, so that nothing here need be declared as changed.

    Args:
        query: ``[1, head, 1, dim]``. keys, values: ``[1, kv head, 1, dim]``. where, tokens: of :class:`SingleCache`.
    """
    query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
    heads, dim = keys.shape[1], keys.shape[3]
    group = query.shape[1] // heads
    splits = max(1, min(64, triton.next_power_of_2(PROGRAMS // heads)))
    out = torch.empty_like(query)
    partial = torch.empty((query.shape[1], splits, dim), dtype=torch.float32, device=query.device)
    sums = torch.empty((query.shape[1], splits, 2), dtype=torch.float32, device=query.device)
    _store[(heads,)](where, keys, values, layer, tokens, HEADS=heads, DIM=dim)
    _attend[(heads, splits)](
        where, query, partial, sums, layer, tokens, scale,
        HEADS=heads, GROUP=group, PAD=max(16, triton.next_power_of_2(group)), DIM=dim, SIZE=BLOCK, SPLITS=splits,
    )  # fmt: skip
    _join[(query.shape[1],)](partial, sums, out, DIM=dim, SPLITS=splits)
    return out


@attend_one.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, where: Tensor, layer: int, tokens: int, scale: float) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@triton.jit(do_not_specialize=["layer"])
def _store(where, keys, values, layer, tokens, HEADS: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    head = tl.program_id(0)
    row = tl.multiple_of(tl.load(where).to(tl.pointer_type(keys.dtype.element_ty)), 16)
    plane = tl.cast(tokens, tl.int64) * DIM
    d = tl.arange(0, DIM)
    at = row + (tl.cast(layer, tl.int64) * (2 * HEADS) + head) * plane + tl.load(where + 1) * DIM + d
    tl.store(at, tl.load(keys + head * DIM + d))
    tl.store(at + HEADS * plane, tl.load(values + head * DIM + d))


@triton.jit(do_not_specialize=["layer"])
def _attend(  # type: ignore[no-untyped-def]
    where,
    query,
    partial,
    sums,
    layer,
    tokens,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAD: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head, split = tl.program_id(0), tl.program_id(1)
    row = tl.multiple_of(tl.load(where).to(tl.pointer_type(query.dtype.element_ty)), 16)  # else loads are narrow
    length = tl.load(where + 1) + 1
    part = tl.cdiv(tl.cdiv(length, SIZE), SPLITS) * SIZE
    first = split * part
    last = tl.minimum(first + part, length)
    plane = tl.cast(tokens, tl.int64) * DIM
    keys = row + (tl.cast(layer, tl.int64) * (2 * HEADS) + head) * plane
    values = keys + HEADS * plane
    g, d = tl.arange(0, PAD), tl.arange(0, DIM)
    mine = (head * GROUP + g)[:, None] * DIM + d[None, :]
    q = tl.load(query + mine, mask=g[:, None] < GROUP, other=0.0)
    peak = tl.full((PAD,), float("-inf"), tl.float32)
    total = tl.zeros((PAD,), tl.float32)
    acc = tl.zeros((PAD, DIM), tl.float32)
    for at in range(first, last, SIZE):
        n = at + tl.arange(0, SIZE)
        inside = n < last
        k = tl.load(keys + n[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(values + n[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp(score - higher[:, None])
        keep = tl.exp(peak - higher)
        total = total * keep + tl.sum(p, 1)
        acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        peak = higher
    at_sums = ((head * GROUP + g) * SPLITS + split) * 2
    tl.store(sums + at_sums, peak, mask=g < GROUP)
    tl.store(sums + at_sums + 1, total, mask=g < GROUP)
    at_partial = ((head * GROUP + g) * SPLITS + split)[:, None] * DIM + d[None, :]
    tl.store(partial + at_partial, acc, mask=g[:, None] < GROUP)


@triton.jit
def _join(partial, sums, out, DIM: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    head = tl.program_id(0)
    s, d = tl.arange(0, SPLITS), tl.arange(0, DIM)
    peak = tl.load(sums + (head * SPLITS + s) * 2)
    total = tl.load(sums + (head * SPLITS + s) * 2 + 1)
    weight = tl.exp(peak - tl.max(peak, 0))
    acc = tl.load(partial + (head * SPLITS + s)[:, None] * DIM + d[None, :])
    value = tl.sum(acc * weight[:, None], 0) / tl.sum(weight * total, 0)
    tl.store(out + head * DIM + d, value.to(out.dtype.element_ty))
