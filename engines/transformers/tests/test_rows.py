"""KV storage: the permutations to and from a landing's blocks."""

from __future__ import annotations

import pytest
import torch
from pdhub_transformers.rows import Geometry, Row

GEOMETRY = Geometry(layers=3, heads=2, dim=4, dtype=torch.float32, device=torch.device("cpu"), block_tokens=4)


def filled(tokens: int) -> Row:
    row = Row(GEOMETRY, tokens)
    row.kv.copy_(torch.arange(row.kv.numel(), dtype=torch.float32).view(row.kv.shape))
    return row


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 11])
def test_a_landing_round_trips(tokens):
    source, target = filled(tokens), Row(GEOMETRY, 20)
    landing = bytearray(GEOMETRY.layout("m").landing_bytes(tokens))
    source.store(memoryview(landing), 0, tokens)
    target.load([torch.frombuffer(landing, dtype=torch.uint8)], tokens, GEOMETRY.layout("m"))
    assert torch.equal(target.kv[..., :tokens, :], source.kv[..., :tokens, :])


def test_every_block_is_where_the_layout_says():
    tokens, layout = 10, GEOMETRY.layout("m")
    source = filled(tokens)
    landing = bytearray(layout.landing_bytes(tokens))
    source.store(memoryview(landing), 0, tokens)
    group = layout.groups[0]
    for block in range(group.blocks(tokens)):
        for layer in range(GEOMETRY.layers):
            at = layout.block_offset(0, layer, block, tokens)
            values = torch.frombuffer(landing[at : at + group.block_bytes], dtype=torch.float32)
            expected = source.kv[layer, :, 0, :, 4 * block : 4 * block + 4]
            assert torch.equal(values.view(expected.shape), expected)


def test_the_tail_of_a_partly_filled_block_is_zero():
    source = filled(6)
    landing = bytearray(b"\xff" * GEOMETRY.layout("m").landing_bytes(6))
    source.store(memoryview(landing), 0, 6)
    target = Row(GEOMETRY, 8)
    target.load([torch.frombuffer(landing, dtype=torch.uint8)], 8, GEOMETRY.layout("m"))
    assert torch.count_nonzero(target.kv[..., 6:, :]) == 0


def test_chunks_are_parts_of_the_whole():
    layout, whole = GEOMETRY.layout("m"), bytearray(GEOMETRY.layout("m").landing_bytes(10))
    filled(10).store(memoryview(whole), 0, 10)
    parts = b""
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        part = bytearray(layout.landing_bytes(stop - start))
        filled(10).store(memoryview(part), start, stop)
        parts += part
    assert parts == whole


@pytest.mark.parametrize("tokens", [3, 4, 9])
def test_landings_of_shards_are_joined_by_heads(tokens):
    source, target = filled(tokens), Row(GEOMETRY, 20)
    whole, cut = GEOMETRY.accepts("m")
    assert (whole.shards, cut.shards) == (1, 2)
    assert whole == GEOMETRY.layout("m")
    shards = []
    one_head = Geometry(layers=3, heads=1, dim=4, dtype=torch.float32, device=torch.device("cpu"), block_tokens=4)
    for head in range(2):
        part = Row(one_head, tokens)
        part.kv.copy_(source.kv[:, :, :, head : head + 1])
        shards.append(bytearray(cut.landing_bytes(tokens)))
        part.store(memoryview(shards[-1]), 0, tokens)
    target.load([torch.frombuffer(shard, dtype=torch.uint8) for shard in shards], tokens, cut)
    assert torch.equal(target.kv[..., :tokens, :], source.kv[..., :tokens, :])
