from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import GroupKind, KVGroup, KVLayout, LayoutMismatch, Order
from pdhub.core.handoff import Move, chunk_blocks, chunk_bytes, largest_chunk_bytes, merge, plan_chunk
from pdhub.core.permutation import plan_permutation


def layout(order: Order, *groups: KVGroup) -> KVLayout:
    return KVLayout("m", 1, 1, groups, order)


def group(name: str, layers: int, bt: int, nbytes: int, kind: GroupKind = GroupKind.FULL) -> KVGroup:
    return KVGroup(name, kind, tuple(range(layers)), bt, nbytes, (f"token:{bt}", "dim:1"), "uint8")


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    base = draw(st.integers(1, 4))
    groups = []
    for i in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from([GroupKind.FULL, GroupKind.MLA, GroupKind.STATE]))
        bt = base * draw(st.integers(1, 3))
        groups.append(group(f"g{i}", draw(st.integers(1, 3)), bt, bt * draw(st.integers(1, 5)), kind))
    return layout(draw(st.sampled_from(list(Order))), *groups)


def unit(lay: KVLayout) -> int:
    """The smallest chunk that cuts no block."""
    return math.lcm(*(g.block_tokens for g in lay.groups if g.kind is not GroupKind.STATE))


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 40), st.integers(0, 20), st.integers(1, 3), st.randoms(use_true_random=False))
def test_chunks_fill_exactly_the_blocks(lay: KVLayout, tokens: int, spare: int, width: int, rng: random.Random) -> None:
    capacity = tokens + spare
    landing = bytearray(lay.landing_bytes(capacity))
    touched = bytearray(len(landing))
    content = {
        (g, layer, block): rng.randbytes(grp.block_bytes)
        for g, grp in enumerate(lay.groups)
        for layer in range(len(grp.layers))
        for block in range(grp.blocks(tokens))
    }
    step = unit(lay) * width
    for start in range(0, tokens, step):
        stop = min(tokens, start + step)
        staged = bytearray()
        for g, grp in enumerate(lay.groups):
            blocks = chunk_blocks(grp, start, stop, tokens)
            layers = range(len(grp.layers))
            if lay.order is Order.BLOCK_MAJOR:
                cells = [(layer, block) for block in blocks for layer in layers]
            else:
                cells = [(layer, block) for layer in layers for block in blocks]
            for layer, block in cells:
                staged += content[g, layer, block]
        assert len(staged) == chunk_bytes(lay, start, stop, tokens) <= largest_chunk_bytes(lay, step)
        moves = plan_chunk(lay, capacity, start, stop, tokens)
        if lay.order is Order.BLOCK_MAJOR:
            assert len(moves) <= len(lay.groups)
        for move in moves:
            assert not any(touched[move.destination : move.destination + move.nbytes])
            touched[move.destination : move.destination + move.nbytes] = b"\1" * move.nbytes
            landing[move.destination : move.destination + move.nbytes] = staged[move.source : move.source + move.nbytes]
    expected = bytearray(len(landing))
    needed = 0
    for (g, layer, block), data in content.items():
        at = lay.block_offset(g, layer, block, capacity)
        expected[at : at + len(data)] = data
        needed += len(data)
    assert landing == expected
    assert sum(touched) == needed


def test_block_major_is_one_write_a_group() -> None:
    lay = layout(Order.BLOCK_MAJOR, group("a", 4, 16, 64), group("b", 2, 16, 32))
    assert [m.nbytes for m in plan_chunk(lay, 100, 32, 64, 100)] == [2 * 4 * 64, 2 * 2 * 32]


def test_merge_joins_only_contiguous_runs() -> None:
    moves = [Move(0, 8, 4), Move(4, 12, 4), Move(8, 20, 4), Move(12, 24, 0)]
    assert merge(moves) == (Move(0, 8, 8), Move(8, 20, 4))


@pytest.mark.parametrize(
    ("start", "stop", "tokens", "capacity"),
    [(0, 0, 10, 16), (8, 4, 10, 16), (0, 12, 10, 16), (0, 10, 10, 8), (-4, 4, 10, 16), (2, 8, 10, 16), (0, 6, 10, 16)],
)
def test_bad_chunks_are_refused(start: int, stop: int, tokens: int, capacity: int) -> None:
    lay = layout(Order.BLOCK_MAJOR, group("a", 2, 4, 8))
    with pytest.raises(ValueError):
        plan_chunk(lay, capacity, start, stop, tokens)


def attention(bt: int, order: Order, dim: int = 2) -> KVLayout:
    axes = ("kv:2", "head:3", f"token:{bt}", f"dim:{dim}")
    return layout(order, KVGroup("a", GroupKind.FULL, (0, 1), bt, 2 * 3 * bt * dim * 2, axes, "float16"))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 6), st.sampled_from(list(Order)), st.sampled_from(list(Order)),
    st.integers(1, 20), st.integers(0, 5), st.integers(0, 5), st.randoms(use_true_random=False),
)  # fmt: skip
def test_permutation_moves_every_row(
    bt_a: int, bt_b: int, order_a: Order, order_b: Order, tokens: int, more_a: int, more_b: int, rng: random.Random
) -> None:
    a, b = attention(bt_a, order_a), attention(bt_b, order_b)
    caps = tokens + more_a, tokens + more_b
    left, right = bytearray(a.landing_bytes(caps[0])), bytearray(b.landing_bytes(caps[1]))
    row = 4

    def place(lay: KVLayout, cap: int, layer: int, outer: int, token: int) -> int:
        bt = lay.groups[0].block_tokens
        return lay.block_offset(0, layer, token // bt, cap) + (outer * bt + token % bt) * row

    rows = {(la, o, t): rng.randbytes(row) for la in range(2) for o in range(6) for t in range(tokens)}
    for key, data in rows.items():
        at = place(a, caps[0], *key)
        left[at : at + row] = data
    for m in plan_permutation(a, b, tokens, source_capacity=caps[0], target_capacity=caps[1]):
        right[m.destination : m.destination + m.nbytes] = left[m.source : m.source + m.nbytes]
    for key, data in rows.items():
        at = place(b, caps[1], *key)
        assert right[at : at + row] == data


@pytest.mark.parametrize(
    "other",
    [
        KVLayout("other", 1, 1, attention(4, Order.BLOCK_MAJOR).groups),
        KVLayout("m", 2, 1, attention(4, Order.BLOCK_MAJOR).groups),
        attention(4, Order.BLOCK_MAJOR, dim=3),
        attention(8, Order.BLOCK_MAJOR, dim=3),
        layout(Order.BLOCK_MAJOR, group("a", 2, 4, 8)),
        layout(Order.BLOCK_MAJOR, KVGroup("a", GroupKind.FULL, (0, 1), 8, 500, ("kv:2", "token:8"), "float16")),
        layout(Order.BLOCK_MAJOR, KVGroup("a", GroupKind.FULL, (0, 1), 8, 96, ("opaque",), "float16")),
    ],
)
def test_what_no_permutation_mends_is_a_mismatch(other: KVLayout) -> None:
    with pytest.raises(LayoutMismatch):
        plan_permutation(attention(4, Order.BLOCK_MAJOR), other, 8, source_capacity=8, target_capacity=8)
