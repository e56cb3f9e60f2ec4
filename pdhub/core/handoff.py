"""Which bytes of a staged chunk go where in a landing. Arithmetic only: no memory, no I/O.

A chunk is staged as :class:`pdhub.api.prefill.KVChunk` says: group after group, each group's blocks of the chunk
in the layout's order. A landing keeps the blocks of the whole prompt in that order. Runs that are contiguous on
both sides become one move, so that a block-major chunk costs one write a group.

A ``state`` group has one block for the whole request; it is final only at the end of the prompt, so it is part of
the last chunk alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdhub.api.layout import GroupKind, KVGroup, KVLayout, Order


@dataclass(frozen=True, slots=True)
class Move:
    """Copy ``nbytes`` from offset ``source`` to offset ``destination``."""

    source: int
    destination: int
    nbytes: int


def merge(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Join neighbours that are contiguous on both sides; empty moves vanish, the order stays."""
    out: list[Move] = []
    for move in moves:
        if not move.nbytes:
            continue
        if out:
            last = out[-1]
            if last.source + last.nbytes == move.source and last.destination + last.nbytes == move.destination:
                out[-1] = Move(last.source, last.destination, last.nbytes + move.nbytes)
                continue
        out.append(move)
    return tuple(out)


def chunk_blocks(group: KVGroup, start: int, stop: int, tokens: int) -> range:
    """Block numbers of ``group`` that the chunk ``[start, stop)`` of a prompt of ``tokens`` tokens carries."""
    if group.kind is GroupKind.STATE:
        return range(1) if stop == tokens else range(0)
    return range(start // group.block_tokens, -(-stop // group.block_tokens))


def chunk_bytes(layout: KVLayout, start: int, stop: int, tokens: int) -> int:
    """Bytes of one shard's staged chunk: what :attr:`KVChunk.nbytes` must be."""
    return sum(len(chunk_blocks(g, start, stop, tokens)) * len(g.layers) * g.block_bytes for g in layout.groups)


def largest_chunk_bytes(layout: KVLayout, chunk_tokens: int) -> int:
    """Upper bound of :func:`chunk_bytes` over every chunk of at most ``chunk_tokens`` tokens."""
    return chunk_bytes(layout, 0, chunk_tokens, chunk_tokens)


def plan_chunk(layout: KVLayout, capacity: int, start: int, stop: int, tokens: int) -> tuple[Move, ...]:
    """Moves from a staged chunk to the landing.

    Args:
        layout: of both sides.
        capacity: tokens of the landing, as in the accept message; it fixes the block offsets.
        start: first token; a multiple of every group's block size.
        stop: one past the last token; a multiple too, unless it ends the prompt.
        tokens: length of the prompt.

    Raises:
        ValueError: the chunk is empty, leaves the prompt or the landing, or cuts a block.
    """
    if not 0 <= start < stop <= tokens <= capacity:
        raise ValueError(f"chunk [{start}, {stop}) does not lie in a prompt of {tokens} tokens, landing {capacity}")
    for group in layout.groups:
        if group.kind is not GroupKind.STATE:
            if start % group.block_tokens:
                raise ValueError(f"chunk start {start} cuts a block of {group.block_tokens} tokens of {group.name!r}")
            if stop % group.block_tokens and stop != tokens:
                raise ValueError(f"chunk stop {stop} cuts a block of {group.block_tokens} tokens of {group.name!r}")
    return merge(_chunk_moves(layout, capacity, start, stop, tokens))


def _chunk_moves(layout: KVLayout, capacity: int, start: int, stop: int, tokens: int) -> Iterator[Move]:
    source = 0
    for index, group in enumerate(layout.groups):
        blocks = chunk_blocks(group, start, stop, tokens)
        if not blocks:
            continue
        # One run: all layers of consecutive blocks (block major), or consecutive blocks of one layer.
        if layout.order is Order.BLOCK_MAJOR:
            runs, size = 1, len(blocks) * len(group.layers) * group.block_bytes
        else:
            runs, size = len(group.layers), len(blocks) * group.block_bytes
        for layer in range(runs):
            yield Move(source, layout.block_offset(index, layer, blocks.start, capacity), size)
            source += size
