import random

import pytest

from pdhub.api import GroupKind, KVGroup, KVLayout, Order
from pdhub.core.digest import KVDigest, landing_digest

CAPACITY = 40


def layout_of(order):
    groups = (
        KVGroup("full", GroupKind.FULL, (0, 2, 5), 4, 12, ("kv:2",), "float32"),
        KVGroup("index", GroupKind.INDEXER, (1,), 8, 7, ("x",), "uint8"),
    )
    return KVLayout("m", 1, 1, groups, order)


def filled(layout, seed=0):
    return bytearray(random.Random(seed).randbytes(layout.landing_bytes(CAPACITY)))


def chunk_of(landing, layout, index, first, count):
    """The blocks as a sender has them, cut out of a landing."""
    group = layout.groups[index]
    layers = range(len(group.layers))
    cells = [(b, layer) for b in range(count) for layer in layers]
    if layout.order is Order.LAYER_MAJOR:
        cells = [(b, layer) for layer in layers for b in range(count)]
    out = bytearray()
    for block, layer in cells:
        start = layout.block_offset(index, layer, first + block, CAPACITY)
        out += landing[start : start + group.block_bytes]
    return memoryview(bytes(out))


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 33, 40])
def test_chunks_in_any_order_give_the_landings_digest(order, tokens):
    layout = layout_of(order)
    landing = filled(layout)
    chunks = [
        (index, start // group.block_tokens, group.blocks(min(start + 16, tokens)) - start // group.block_tokens)
        for index, group in enumerate(layout.groups)
        for start in range(0, tokens, 16)
    ]
    random.Random(tokens).shuffle(chunks)
    sender = KVDigest(layout)
    for index, first, count in chunks:
        sender.add_blocks(index, first, count, chunk_of(landing, layout, index, first, count))
    assert sender.hexdigest() == landing_digest(memoryview(landing), layout, CAPACITY, tokens)


@pytest.mark.parametrize("order", list(Order))
def test_every_byte_of_the_prompts_blocks_counts_and_no_other(order):
    layout = layout_of(order)
    landing = filled(layout)
    tokens = 9
    before = landing_digest(memoryview(landing), layout, CAPACITY, tokens)
    needed = set()
    for index, group in enumerate(layout.groups):
        for layer in range(len(group.layers)):
            for block in range(group.blocks(tokens)):
                start = layout.block_offset(index, layer, block, CAPACITY)
                needed |= set(range(start, start + group.block_bytes))
    for position in range(len(landing)):
        landing[position] ^= 1
        changed = landing_digest(memoryview(landing), layout, CAPACITY, tokens) != before
        landing[position] ^= 1
        assert changed == (position in needed)


def test_two_blocks_that_changed_places_change_the_digest():
    layout = layout_of(Order.BLOCK_MAJOR)
    landing = filled(layout)
    before = landing_digest(memoryview(landing), layout, CAPACITY, CAPACITY)
    landing[0:12], landing[12:24] = landing[12:24], landing[0:12]
    assert landing_digest(memoryview(landing), layout, CAPACITY, CAPACITY) != before
