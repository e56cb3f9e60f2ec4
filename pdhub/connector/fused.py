"""One kernel for a whole piece: keys and values of all layers out of paged caches on a GPU, in canonical order.

Copying layer by layer launches hundreds of small kernels a piece, from a thread that shares the interpreter with vLLM's
own: prefill then waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


class FusedGather:
    """Layers of one group whose caches are alike, ``[B, H, N, 2D]`` with any strides, a row key then value.

    Args:
        caches: one a layer. heads: how many of each cache's are copied. block_tokens: of a block on the wire.

    Raises:
        ValueError: the caches differ, or a size is not one that the kernel has.
    """

    def __init__(self, caches: Sequence[Tensor], *, heads: int, block_tokens: int) -> None:
        first = caches[0]
        _, _, size, width = first.shape
        alike = all((c.shape, c.stride(), c.dtype) == (first.shape, first.stride(), first.dtype) for c in caches)
        if not alike or first.stride(3) != 1 or any(c.data_ptr() % 16 for c in caches):
            raise ValueError("the caches are not alike")
        if any(n & (n - 1) for n in (block_tokens, size, width)):
            raise ValueError("a size is no power of two")
        self._caches = tuple(caches)  # alive as long as their addresses are in the table
        self._table = torch.tensor([c.data_ptr() for c in caches], dtype=torch.int64, device=first.device)
        self._strides = first.stride()[:3]
        self._heads, self._size, self._dim, self._wire = heads, size, width // 2, block_tokens
        self._block = len(caches) * 2 * heads * block_tokens * self._dim
        warm = torch.empty(self._block, dtype=first.dtype, device=first.device)
        self(warm.view(torch.uint8), torch.zeros(1, dtype=torch.int64, device=first.device), 0, 1)

    def __call__(self, out: Tensor, ids: Tensor, skip: int, tokens: int) -> None:
        """Copy ``tokens`` tokens; what is left of the last block becomes zero.

        Args:
            out: contiguous bytes of whole blocks, ``[block][layer][kv][head][token][dim]``.
            ids: blocks of the caches, the first of which has ``skip`` tokens before the piece.
        """
        typed = out.view(self._caches[0].dtype)
        blocks = typed.numel() // self._block
        _gather[(blocks, len(self._caches), self._heads)](
            typed, self._table, ids, skip, tokens, *self._strides,
            LAYERS=len(self._caches), HEADS=self._heads, SIZE=self._size, DIM=self._dim, WIRE=self._wire,
        )  # fmt: skip


@triton.jit(do_not_specialize=["skip", "tokens"])  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    out,
    table,
    ids,
    skip,
    tokens,
    block_stride,
    head_stride,
    token_stride,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    WIRE: tl.constexpr,
):
    block, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cache = tl.multiple_of(tl.load(table + layer).to(tl.pointer_type(out.dtype.element_ty)), 16)
    slot, d = tl.arange(0, WIRE), tl.arange(0, DIM)
    token = block * WIRE + slot
    there = token < tokens
    place = token + skip
    number = tl.load(ids + place // SIZE, mask=there, other=0)
    row = cache + number * block_stride + head * head_stride + (place % SIZE) * token_stride
    source = row[:, None] + d[None, :]
    keys = tl.load(source, mask=there[:, None], other=0.0)
    values = tl.load(source + DIM, mask=there[:, None], other=0.0)
    plane = HEADS * WIRE * DIM
    start = (tl.cast(block, tl.int64) * LAYERS + layer) * (2 * plane) + head * (WIRE * DIM)
    target = out + start + slot[:, None] * DIM + d[None, :]
    tl.store(target, keys)
    tl.store(target + plane, values)
