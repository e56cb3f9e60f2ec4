"""Rows out of vLLM's paged cache: pure functions from a cache tensor and block ids to values in canonical order.

Each selects the blocks of one piece first, so that nothing ever touches, views or copies the rest of the cache; what
follows are views of that selection. Works for any strides: blocks outermost, heads outermost, padded pages.

Shapes: B blocks, H heads, N tokens a block, D head size, n selected blocks.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from pdhub.connector.layouts import INDEXER_PAGE, INDEXER_TOKENS, INDEXER_VALUES


class Physical(StrEnum):
    """Where keys and values are in a cache tensor of full or sliding attention.

    ``PACKED``: ``[B, H, N, 2D]``, a row is key then value. ``PLANES``: ``[2, B, N, H, D]``.
    ``PAIRS``: ``[B, 2, N, H, D]``. ``VEC``: ``[B, H, N, 2D]`` by size only, as vLLM's CPU kernels keep it: in a block
    of a head first the keys transposed, ``[D, N]``, then the values, ``[N, D]``. ``VEC_PLANES``: the same in older
    releases, ``[2, B, H, N, D]``.
    """

    PACKED = "packed"
    PLANES = "planes"
    PAIRS = "pairs"
    VEC = "vec"
    VEC_PLANES = "vec_planes"


def physical_of(shape: tuple[int, ...], blocks: int, *, cpu: bool) -> Physical:
    """Read it off a tensor's shape.

    Args:
        blocks: number of blocks of the cache, in the units of the tensor.

    Raises:
        ValueError: no known one.
    """
    if len(shape) == 4 and shape[0] == blocks:
        return Physical.VEC if cpu else Physical.PACKED
    if len(shape) == 5 and shape[0] == 2 and shape[1] == blocks:
        return Physical.VEC_PLANES if cpu else Physical.PLANES
    if len(shape) == 5 and shape[1] == 2 and shape[0] == blocks and not cpu:
        return Physical.PAIRS
    raise ValueError(f"a cache tensor of shape {shape} for {blocks} blocks is none that is known")


def attention(cache: Tensor, ids: Tensor, physical: Physical) -> tuple[Tensor, Tensor]:
    """Keys and values of whole blocks, each ``[H, n * N, D]`` (a view of the selection where it can be one)."""
    if physical is Physical.PACKED:
        rows = cache.index_select(0, ids)
        keys, values = rows.tensor_split(2, dim=-1)
        return _join(keys.transpose(0, 1)), _join(values.transpose(0, 1))
    if physical is Physical.VEC:
        n, heads, tokens, width = ids.numel(), cache.shape[1], cache.shape[2], cache.shape[3]
        both = cache.index_select(0, ids).reshape(n, heads, 2, tokens * width // 2)
        keys = both[:, :, 0].unflatten(-1, (width // 2, tokens)).transpose(-1, -2)
        values = both[:, :, 1].unflatten(-1, (tokens, width // 2))
        return _join(keys.transpose(0, 1)), _join(values.transpose(0, 1))
    if physical is Physical.VEC_PLANES:
        tokens, dim = cache.shape[3], cache.shape[4]
        keys = cache[0].index_select(0, ids).flatten(2).unflatten(-1, (dim, tokens)).transpose(-1, -2)
        values = cache[1].index_select(0, ids)
        return _join(keys.transpose(0, 1)), _join(values.transpose(0, 1))
    if physical is Physical.PLANES:
        keys, values = (cache[i].index_select(0, ids) for i in (0, 1))
    else:
        keys, values = cache.index_select(0, ids).unbind(1)
    return _join(keys.permute(2, 0, 1, 3)), _join(values.permute(2, 0, 1, 3))


def latent(cache: Tensor, ids: Tensor) -> Tensor:
    """Rows of an MLA cache, ``[B, 1, N, C]`` or ``[B, N, C]``: ``[n * N, C]``."""
    rows = cache.index_select(0, ids)
    return rows.reshape(-1, rows.shape[-1])


def indexer(cache: Tensor, ids: Tensor, *, ue8m0: bool) -> Tensor:
    """Pages of an indexer cache, uint8 ``[B, 1, N, 132]`` or ``[B, N, 132]``, N a multiple of 64: ``[pages, 8448]``.

    Only the size of a row is 132 bytes. A block is planar: all its values, then all its scales; so blocks of more than
    64 tokens are cut here.

    Args:
        ue8m0: the scale of a token is its exponent in four equal bytes, as on SM100, and not a float32.
    """
    blocks = cache.index_select(0, ids).reshape(ids.numel(), -1)
    parts = blocks.shape[1] // INDEXER_PAGE
    border = parts * INDEXER_VALUES
    values = blocks[:, :border].reshape(-1, INDEXER_VALUES)
    scales = blocks[:, border:].reshape(-1, INDEXER_PAGE - INDEXER_VALUES)
    if ue8m0:
        scales = float32_scales(scales)
    return torch.cat([values, scales], dim=1)


def float32_scales(scales: Tensor) -> Tensor:
    """UE8M0 scales, four equal bytes each, as the bytes of float32: ``2 ** (e - 127)``; 255 is not a number."""
    exponent = scales[..., ::4].to(torch.int32)
    bits = torch.where(exponent == 0, 1 << 22, exponent << 23)  # 2 ** -127 is below float32's normal numbers
    bits = torch.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(torch.int32).view(torch.uint8)


def kernel_ids(ids: Tensor, ratio: int) -> Tensor:
    """Block ids in the units of a tensor whose blocks are ``ratio`` times smaller than the scheduler's."""
    if ratio == 1:
        return ids
    return (ids.unsqueeze(1) * ratio + torch.arange(ratio, device=ids.device)).flatten()


def clear_page_tail(pages: Tensor, tokens: int) -> None:
    """Zero what lies after ``tokens`` tokens, in place. ``pages``: ``[pages, 8448]``."""
    first, kept = divmod(tokens, INDEXER_TOKENS)
    if kept:
        page = pages[first]
        page[kept * 128 : INDEXER_VALUES] = 0
        page[INDEXER_VALUES + kept * 4 :] = 0
        first += 1
    pages[first:] = 0


def _join(part: Tensor) -> Tensor:
    """``[H, n, N, D]`` → ``[H, n * N, D]``."""
    return part.flatten(1, 2)
