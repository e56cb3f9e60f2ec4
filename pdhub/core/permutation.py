"""Moves between two layouts that hold the same bytes in another order. Anything else is the engine's ``inject``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from pdhub.api.errors import LayoutMismatch
from pdhub.api.layout import GroupKind, KVGroup, KVLayout
from pdhub.core.handoff import Move, merge


@dataclass(frozen=True, slots=True)
class _Rows:
    """A block as ``outer`` pieces, each with one row of ``row_bytes`` for every token."""

    outer: int
    row_bytes: int


def _axes(group: KVGroup) -> list[tuple[str, int]]:
    out = []
    for axis in group.axes:
        name, _, size = axis.partition(":")
        if not size.isdigit():
            raise LayoutMismatch(f"group {group.name!r}: axis {axis!r} has no size, so its blocks cannot be cut")
        out.append((name, int(size)))
    return out


def _rows(group: KVGroup) -> _Rows:
    axes = _axes(group)
    at = [i for i, (name, _) in enumerate(axes) if name == "token"]
    elements = prod(size for _, size in axes)
    if len(at) != 1 or axes[at[0]][1] != group.block_tokens or not elements or group.block_bytes % elements:
        raise LayoutMismatch(f"group {group.name!r}: its blocks are padded or have no token axis and cannot be cut")
    inner = prod(size for _, size in axes[at[0] + 1 :])
    return _Rows(prod(size for _, size in axes[: at[0]]), inner * (group.block_bytes // elements))


def _check(source: KVLayout, target: KVLayout) -> None:
    for what, a, b in (
        ("model", source.model, target.model),
        ("version", source.version, target.version),
        ("shards", source.shards, target.shards),
        ("groups", len(source.groups), len(target.groups)),
    ):
        if a != b:
            raise LayoutMismatch(f"layouts differ in their {what}: {a} and {b}")
    for left, right in zip(source.groups, target.groups, strict=True):
        for member in ("name", "kind", "layers", "dtype", "window"):
            if getattr(left, member) != getattr(right, member):
                raise LayoutMismatch(f"group {left.name!r} differs in {member}, which no permutation mends")


def plan_permutation(
    source: KVLayout, target: KVLayout, tokens: int, *, source_capacity: int, target_capacity: int
) -> tuple[Move, ...]:
    """Moves that turn a landing of ``source`` into one of ``target``, which may differ in ``order`` and in
    ``block_tokens``. Where the block sizes differ exactly the rows of ``tokens`` tokens move, else whole blocks.

    Raises:
        LayoutMismatch: the bytes differ in more than their place.
    """
    _check(source, target)
    moves: list[Move] = []
    for index, (left, right) in enumerate(zip(source.groups, target.groups, strict=True)):
        same = left.block_tokens == right.block_tokens or left.kind is GroupKind.STATE
        if same and (left.block_bytes != right.block_bytes or left.axes != right.axes):
            raise LayoutMismatch(f"group {left.name!r} differs inside its blocks")
        for layer in range(len(left.layers)):
            if same:
                moves += (
                    Move(
                        source.block_offset(index, layer, block, source_capacity),
                        target.block_offset(index, layer, block, target_capacity),
                        left.block_bytes,
                    )
                    for block in range(left.blocks(tokens))
                )
            else:
                moves += _cut(source, target, index, layer, tokens, source_capacity, target_capacity)
    return merge(moves)


def _cut(
    source: KVLayout, target: KVLayout, index: int, layer: int, tokens: int, source_capacity: int, target_capacity: int
) -> Iterator[Move]:
    left, right = source.groups[index], target.groups[index]
    rows = _rows(left)
    shapes = [[axis for axis in _axes(group) if axis[0] != "token"] for group in (left, right)]
    if rows != _rows(right) or shapes[0] != shapes[1]:
        raise LayoutMismatch(f"group {left.name!r} differs in more than its block size")
    for outer in range(rows.outer):
        at = 0
        while at < tokens:
            # up to the nearer block border of the two sides
            stop = min(tokens, *((at // g.block_tokens + 1) * g.block_tokens for g in (left, right)))
            offsets = [
                layout.block_offset(index, layer, at // group.block_tokens, capacity)
                + (outer * group.block_tokens + at % group.block_tokens) * rows.row_bytes
                for layout, group, capacity in ((source, left, source_capacity), (target, right, target_capacity))
            ]
            yield Move(offsets[0], offsets[1], (stop - at) * rows.row_bytes)
            at = stop
