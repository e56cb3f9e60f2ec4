"""Every physical layout of vLLM's cache, against slow code that looks tokens up one by one."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from pdhub.api import ConfigError, EngineFailed, GroupKind, Region  # noqa: E402
from pdhub.connector.gather import Physical, float32_scales, physical_of  # noqa: E402
from pdhub.connector.handover import Handover  # noqa: E402
from pdhub.connector.layouts import INDEXER_PAGE, Layer, piece_tokens, plan  # noqa: E402
from pdhub.connector.source import Cache, TorchSource  # noqa: E402
from pdhub.connector.specs import layers_of  # noqa: E402
from pdhub.connector.steps import Advance, Start  # noqa: E402
from pdhub.core.handoff import plan_chunk  # noqa: E402
from pdhub.wire.http import HandoffParams  # noqa: E402

BLOCKS, TOKENS, HEADS, DIM = 9, 8, 2, 4
CPU = torch.device("cpu")


def handover(table, tokens, groups=1):
    start = Start("r", HandoffParams("t", 1, "h", 1, "f"), tokens)
    found = Handover(start, None, 0.0)
    found.advance(Advance("r", (tuple(table),) * groups, True, 0, tokens), None)
    return found


def landing_of(source, the_plan, one, chunk=10**6):
    """What a node would see: every piece moved to its place."""
    layout, tokens = the_plan.layout, one.tokens
    landing = bytearray(b"\xee" * layout.landing_bytes(tokens))
    for at in range(0, tokens, chunk):
        stop = min(at + chunk, tokens)
        piece = bytearray(b"\xdd" * source.nbytes(at, stop, tokens))
        source.copy(one, at, stop, Region("s", 0, len(piece), "cpu", memoryview(piece)))
        for move in plan_chunk(layout, tokens, at, stop, tokens):
            landing[move.destination : move.destination + move.nbytes] = piece[move.source : move.source + move.nbytes]
    return landing


def attention_cache(physical, dtype=torch.float32):
    """A cache tensor, and ``look(kv, block, token, head)`` that reads one row the slow way."""
    torch.manual_seed(1)
    if physical is Physical.PLANES:
        cache = torch.randn(2, BLOCKS, TOKENS, HEADS, DIM).to(dtype)
        return cache, lambda kv, b, t, h: cache[kv, b, t, h]
    if physical is Physical.PAIRS:
        cache = torch.randn(BLOCKS, 2, TOKENS, HEADS, DIM).to(dtype)
        return cache, lambda kv, b, t, h: cache[b, kv, t, h]
    if physical is Physical.VEC_PLANES:
        cache = torch.randn(2, BLOCKS, HEADS, TOKENS, DIM).to(dtype)
        raw = cache.reshape(2, BLOCKS, HEADS, -1)
        return cache, lambda kv, b, t, h: raw[0, b, h, t::TOKENS] if kv == 0 else cache[1, b, h, t]
    cache = torch.randn(BLOCKS, HEADS, TOKENS, 2 * DIM).to(dtype)
    if physical is Physical.PACKED:
        return cache, lambda kv, b, t, h: cache[b, h, t, kv * DIM : (kv + 1) * DIM]
    raw = cache.reshape(BLOCKS, HEADS, -1)
    half = TOKENS * DIM
    return (
        cache,
        lambda kv, b, t, h: (
            raw[b, h, :half][t::TOKENS] if kv == 0 else raw[b, h, half + t * DIM : half + (t + 1) * DIM]
        ),
    )


def attention_plan(caches, wire, kind=GroupKind.FULL, window=0, block_tokens=TOKENS, dtype="float32"):
    layers = [Layer(f"l.{i}.attn", i, 0, kind, block_tokens, HEADS, DIM, dtype, window) for i in range(len(caches))]
    return plan(layers, model="m", shards=1, block_tokens=wire)


@pytest.mark.parametrize("physical", list(Physical))
@pytest.mark.parametrize("wire", [2, 16])
@pytest.mark.parametrize("tokens", [1, 8, 29])
def test_attention_in_every_physical_layout(physical, wire, tokens):
    made = [attention_cache(physical) for _ in range(2)]
    made[1] = (made[1][0].mul_(2), made[1][1])
    the_plan = attention_plan(made, wire)
    source = TorchSource(the_plan, {f"l.{i}.attn": Cache(cache, 1, physical) for i, (cache, _) in enumerate(made)}, CPU)
    table = [7, 2, 5, 1]
    landing = landing_of(source, the_plan, handover(table, tokens), chunk=16)
    layout = the_plan.layout
    for layer, kv, head, token in itertools.product(range(2), range(2), range(HEADS), range(-(-tokens // wire) * wire)):
        at = layout.block_offset(0, layer, token // wire, tokens)
        at += ((kv * HEADS + head) * wire + token % wire) * DIM * 4
        got = torch.frombuffer(landing, dtype=torch.float32, offset=at, count=DIM)
        if token < tokens:
            assert torch.equal(got, made[layer][1](kv, table[token // TOKENS], token % TOKENS, head))
        else:
            assert not got.any()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_of_blocks_heads_and_tokens_in_memory(order):
    plain, look = attention_cache(Physical.PACKED, torch.bfloat16)
    inverse = [order.index(i) for i in range(3)]
    cache = plain.permute(*order, 3).contiguous().permute(*inverse, 3)
    assert torch.equal(cache, plain)
    the_plan = attention_plan([cache], 4, dtype="bfloat16")
    landing = landing_of(TorchSource(the_plan, {"l.0.attn": Cache(cache)}, CPU), the_plan, handover([3, 4], 11))
    values = torch.frombuffer(landing, dtype=torch.bfloat16).view(3, 1, 2, HEADS, 4, DIM)
    for token in range(11):
        got = values[token // 4, 0, :, :, token % 4]
        assert torch.equal(got[1, 1], look(1, [3, 4][token // TOKENS], token % TOKENS, 1))


def test_a_cache_in_kernel_blocks_and_one_with_blocks_of_all_layers_together():
    packed, _ = attention_cache(Physical.PACKED)
    the_plan = attention_plan([packed], 4)
    small = packed.view(BLOCKS, HEADS, 2, TOKENS // 2, 2 * DIM).transpose(1, 2).reshape(2 * BLOCKS, HEADS, -1, 2 * DIM)
    want = landing_of(TorchSource(the_plan, {"l.0.attn": Cache(packed)}, CPU), the_plan, handover([8, 0], 13))
    assert want == landing_of(TorchSource(the_plan, {"l.0.attn": Cache(small, 2)}, CPU), the_plan, handover([8, 0], 13))
    together = torch.stack([packed, packed + 1], 1)[:, 0]
    assert together.stride(0) == 2 * packed.stride(0)
    got = landing_of(TorchSource(the_plan, {"l.0.attn": Cache(together)}, CPU), the_plan, handover([8, 0], 13))
    assert got == want


def test_what_left_a_sliding_window_is_zero():
    cache, look = attention_cache(Physical.PACKED)
    the_plan = attention_plan([cache], 4, GroupKind.SLIDING, 6)
    one = handover([0, 4, 2], 20)
    one.floor = 14
    landing = landing_of(TorchSource(the_plan, {"l.0.attn": Cache(cache)}, CPU), the_plan, one)
    values = torch.frombuffer(landing, dtype=torch.float32).view(5, 2, HEADS, 4, DIM)
    for token in range(20):
        got = values[token // 4, :, :, token % 4]
        if token < 14:
            assert not got.any()
        else:
            assert torch.equal(got[0, 1], look(0, [0, 4, 2][token // TOKENS], token % TOKENS, 1))
    assert the_plan.window == 6
    assert the_plan.layout.groups[0].name == "sliding6"


@pytest.mark.parametrize(("dtype", "width"), [("float32", 12), ("bfloat16", 576), ("fp8_ds_mla", 656)])
@pytest.mark.parametrize("flat", [True, False])
def test_latents_are_rows(dtype, width, flat):
    raw = torch.uint8 if dtype == "fp8_ds_mla" else getattr(torch, dtype)
    cache = torch.randint(0, 200, (BLOCKS, 1, TOKENS, width)).to(raw)
    the_plan = plan(
        [Layer("l.0.attn", 0, 0, GroupKind.MLA, TOKENS, 1, width, dtype)], model="m", shards=1, block_tokens=4
    )
    shown = cache[:, 0] if flat else cache
    landing = landing_of(
        TorchSource(the_plan, {"l.0.attn": Cache(shown)}, CPU), the_plan, handover([6, 3], 13), chunk=8
    )
    rows = torch.frombuffer(landing, dtype=raw).view(-1, width)
    assert rows.shape[0] == 16
    for token in range(13):
        assert torch.equal(rows[token], cache[[6, 3][token // TOKENS], 0, token % TOKENS])
    assert not rows[13:].any()


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_indexer_pages_are_planar(size, ue8m0, tokens):
    torch.manual_seed(0)
    cache = torch.zeros(BLOCKS, 1, size, 132, dtype=torch.uint8)
    flat = cache.view(BLOCKS, -1)
    values = torch.randint(1, 255, (BLOCKS, size, 128), dtype=torch.uint8)
    exponents = torch.randint(100, 150, (BLOCKS, size))
    scales = torch.pow(2.0, exponents.double() - 127).float()
    flat[:, : size * 128] = values.view(BLOCKS, -1)
    encoded = exponents.to(torch.uint8).repeat_interleave(4, 1) if ue8m0 else scales.view(torch.uint8)
    flat[:, size * 128 :] = encoded.view(BLOCKS, -1)
    layer = Layer("l.0.indexer.k_cache", 0, 0, GroupKind.INDEXER, size, 1, 132, "uint8")
    the_plan = plan([layer], model="m", shards=1, block_tokens=16)
    assert the_plan.align == 64
    table = [5, 2, 8, 1]
    source = TorchSource(the_plan, {layer.name: Cache(cache, ue8m0=ue8m0)}, CPU)
    landing = landing_of(source, the_plan, handover(table, tokens), chunk=64)
    assert len(landing) == -(-tokens // 64) * INDEXER_PAGE
    for token in range(len(landing) // INDEXER_PAGE * 64):
        page = landing[token // 64 * INDEXER_PAGE :][:INDEXER_PAGE]
        row, scale = page[token % 64 * 128 :][:128], page[8192 + token % 64 * 4 :][:4]
        if token < tokens:
            block, at = table[token // size], token % size
            assert row == values[block, at].numpy().tobytes()
            assert scale == scales[block, at].numpy().tobytes()
        else:
            assert not any(row)
            assert not any(scale)


def test_every_ue8m0_exponent():
    exponents = torch.arange(256, dtype=torch.uint8)
    got = float32_scales(exponents.repeat_interleave(4)).view(torch.float32)
    assert torch.equal(got[:255], torch.pow(2.0, torch.arange(255).double() - 127).float())
    assert torch.isnan(got[255])


def test_groups_are_told_apart_and_ordered():
    def layer(number, kind, group=0, heads=2, window=0, name="attn"):
        return Layer(f"m.layers.{number}.{name}", number, group, kind, 64, heads, 8, "bfloat16", window)

    the_plan = plan(
        [
            layer(3, GroupKind.SLIDING, 1, window=32),
            layer(1, GroupKind.SLIDING, 1, window=32),
            layer(2, GroupKind.FULL),
            layer(0, GroupKind.FULL),
            layer(4, GroupKind.FULL, heads=4),
            Layer("m.layers.0.indexer.k", 0, 2, GroupKind.INDEXER, 64, 1, 132, "uint8"),
        ],
        model="m",
        shards=2,
        block_tokens=16,
    )
    assert [(g.name, g.layers) for g in the_plan.layout.groups] == [
        ("kv", (0, 2)),
        ("kv-1", (4,)),
        ("sliding32", (1, 3)),
        ("indexer", (0,)),
    ]
    assert the_plan.layout.shards == 2
    assert piece_tokens(the_plan, 512, 1 << 30) == 512
    unit = the_plan.layout.landing_bytes(64)
    assert piece_tokens(the_plan, 512, 4 * unit) == 64
    assert piece_tokens(the_plan, 10, 1) == 64


def spec(kind, **more):
    return type(kind, (), {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": DIM, **more})()


def found(specs, tensors, **more):
    groups = [SimpleNamespace(layer_names=list(names), kv_cache_spec=one) for names, one in specs]
    config = SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS)
    return {layer.name: (layer, cache) for layer, cache in layers_of(config, tensors, ue8m0=False, **more)}


def test_vllms_description_is_read_by_names_of_classes():
    packed, latents = (
        torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM),
        torch.zeros(BLOCKS, 1, TOKENS, 656, dtype=torch.uint8),
    )
    whole = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"model.layers.1.self_attn": spec("MLAAttentionSpec")})
    layers = found(
        [
            (["model.layers.0.self_attn.attn"], spec("FullAttentionSpec")),
            (["model.layers.2.self_attn.attn"], spec("SlidingWindowSpec", sliding_window=4)),
            (["model.layers.1.self_attn"], whole),
        ],
        {
            "model.layers.0.self_attn.attn": packed,
            "model.layers.2.self_attn.attn": packed,
            "model.layers.1.self_attn": latents,
        },
    )
    kinds = {name: (layer.number, layer.group, layer.kind, layer.dtype) for name, (layer, _) in layers.items()}
    assert kinds == {
        "model.layers.0.self_attn.attn": (0, 0, "full", "float32"),
        "model.layers.2.self_attn.attn": (2, 1, "sliding", "float32"),
        "model.layers.1.self_attn": (1, 2, "mla", "fp8_ds_mla"),
    }
    assert layers["model.layers.0.self_attn.attn"][1].physical is Physical.VEC


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "more"),
    [
        ("MambaSpec", (BLOCKS, 4), torch.float32, {}),
        ("FullAttentionSpec", (BLOCKS, HEADS, TOKENS, 2 * DIM), torch.uint8, {}),
        ("FullAttentionSpec", (BLOCKS, HEADS, TOKENS, 2 * DIM), torch.float32, {"head_size_v": 2}),
        ("FullAttentionSpec", (BLOCKS, HEADS, 2 * DIM), torch.float32, {}),
        ("MLAAttentionSpec", (BLOCKS, 1, TOKENS, 576), torch.uint8, {}),
    ],
)
def test_a_cache_without_a_form_on_the_wire_is_refused_at_the_start(kind, shape, dtype, more):
    name = "model.layers.0.attn"
    with pytest.raises(ConfigError, match=r"layers\.0\.attn"):
        found([([name], spec(kind, **more))], {name: torch.zeros(shape, dtype=dtype)})


def test_shapes_tell_the_physical_layout():
    assert physical_of((9, 2, 8, 8), 9, cpu=False) is Physical.PACKED
    assert physical_of((2, 9, 8, 2, 4), 9, cpu=False) is Physical.PLANES
    assert physical_of((9, 2, 8, 2, 4), 9, cpu=False) is Physical.PAIRS
    assert physical_of((2, 9, 2, 8, 4), 9, cpu=True) is Physical.VEC_PLANES
    with pytest.raises(ValueError, match="none that is known"):
        physical_of((8, 2, 8, 8), 9, cpu=False)


def test_a_block_table_that_is_too_short_is_an_error_and_no_other_requests_bytes():
    cache, _ = attention_cache(Physical.PACKED)
    the_plan = attention_plan([cache], 4)
    source = TorchSource(the_plan, {"l.0.attn": Cache(cache)}, CPU)
    with pytest.raises(EngineFailed, match="2 are computed"):
        source.copy(handover([1], 16), 0, 16, Region("s", 0, 4096, "cpu", memoryview(bytearray(4096))))
