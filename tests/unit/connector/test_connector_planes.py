"""Planes of a latent cache, against slow code that looks every token up."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pdhub.api import ConfigError, GroupKind, Order, Region  # noqa: E402
from pdhub.connector.handover import Handover  # noqa: E402
from pdhub.connector.layouts import Layer  # noqa: E402
from pdhub.connector.options import ConnectorOptions  # noqa: E402
from pdhub.connector.planes import plan_planes  # noqa: E402
from pdhub.connector.source import Cache, TorchSource  # noqa: E402
from pdhub.connector.steps import Advance, Start  # noqa: E402
from pdhub.connector.worker import Place, Worker  # noqa: E402
from pdhub.core.handoff import plan_chunk  # noqa: E402
from pdhub.wire.http import HandoffParams  # noqa: E402

BLOCKS, LAYERS, OWN, TABLE = 6, 5, (0, 1, 3), (4, 0, 5, 2)
CPU = torch.device("cpu")
ROWS = {"fp8_ds_mla": (656, 528), "bfloat16": (1152, 1024)}


def caches(dtype, own=OWN):
    """Layers in no order, and their tensors: random bytes."""
    row = ROWS[dtype][0]
    out = {}
    for number in reversed(range(LAYERS)):
        raw = torch.randint(1, 255, (BLOCKS, 1, 64, row), dtype=torch.uint8)
        tensor = raw if dtype == "fp8_ds_mla" else raw.view(torch.bfloat16)
        name = f"l.{number}.attn"
        out[name] = (Layer(name, number, 0, GroupKind.MLA, 64, 1, tensor.shape[-1], dtype), Cache(tensor))
        if number in own:
            pages = torch.randint(1, 255, (BLOCKS, 1, 64, 132), dtype=torch.uint8)
            name = f"l.{number}.indexer.k_cache"
            out[name] = (Layer(name, number, 0, GroupKind.INDEXER, 64, 1, 132, "uint8"), Cache(pages))
    return out


def landing_of(made, tokens, shards, shard, chunk):
    plan = plan_planes((layer for layer, _ in made.values()), model="m", shards=shards, shard=shard)
    source = TorchSource(plan, {name: cache for name, (_, cache) in made.items()}, CPU)
    handover = Handover(Start("r", HandoffParams("t", 1, "h", 1, "f"), tokens), None, 0.0)
    handover.advance(Advance("r", (TABLE,), True, 0, tokens), None)
    capacity = -(-tokens // 64) * 64
    landing = bytearray(b"\xee" * plan.layout.landing_bytes(capacity))
    for at in range(0, tokens, chunk):
        stop = min(at + chunk, tokens)
        piece = bytearray(b"\xdd" * source.nbytes(at, stop, tokens))
        source.copy(handover, at, stop, Region("s", 0, len(piece), "cpu", memoryview(piece)))
        for move in plan_chunk(plan.layout, capacity, at, stop, tokens):
            landing[move.destination : move.destination + move.nbytes] = piece[move.source : move.source + move.nbytes]
    return plan.layout, capacity, bytes(landing)


@pytest.mark.parametrize("dtype", list(ROWS))
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_every_byte_is_where_tilert_looks_for_it(dtype, shards, tokens):
    made, (row, cut) = caches(dtype), ROWS[dtype]
    for shard in range(shards):
        layout, capacity, landing = landing_of(made, tokens, shards, shard, chunk=64)
        places, pages = -(-LAYERS // shards), capacity // 64
        pe_base = places * capacity * cut
        ki_base = pe_base + places * capacity * 128
        assert len(landing) == ki_base + places * pages * 8448
        assert (layout.order, layout.shards) == (Order.LAYER_MAJOR, shards)
        for place in range(places):
            number = shard + place * shards
            kv = landing[place * capacity * cut :][: capacity * cut]
            pe = landing[pe_base + place * capacity * 128 :][: capacity * 128]
            ki = landing[ki_base + place * pages * 8448 :][: pages * 8448]
            if number >= LAYERS:
                assert not any(kv + pe + ki)
                continue
            rows = made[f"l.{number}.attn"][1].tensor[list(TABLE)].view(torch.uint8).reshape(-1, row)[:tokens]
            assert kv == rows[:, :cut].contiguous().numpy().tobytes() + bytes((capacity - tokens) * cut)
            assert pe == rows[:, cut:].contiguous().numpy().tobytes() + bytes((capacity - tokens) * 128)
            owner = max(n for n in OWN if n <= number)
            for page in range(pages):
                flat = made[f"l.{owner}.indexer.k_cache"][1].tensor[TABLE[page]].reshape(-1).numpy().tobytes()
                kept = min(64, tokens - page * 64)
                want = flat[: kept * 128].ljust(8192, b"\0") + flat[8192 : 8192 + kept * 4].ljust(256, b"\0")
                assert ki[page * 8448 :][:8448] == want


def test_layouts_differ_where_their_bytes_do():
    def fingerprint(dtype="fp8_ds_mla", own=OWN, shards=1):
        made = caches(dtype, own)
        return plan_planes((layer for layer, _ in made.values()), model="m", shards=shards, shard=0).layout.fingerprint

    found = [fingerprint(), fingerprint("bfloat16"), fingerprint(own=(0, 2)), fingerprint(own=range(LAYERS))]
    assert len({*found, fingerprint(shards=2)}) == 5
    assert found[0] == fingerprint()


def test_what_has_no_planes_is_refused_at_the_start():
    made = [layer for layer, _ in caches("fp8_ds_mla").values()]
    full = Layer("l.0.attn", 0, 0, GroupKind.FULL, 64, 1, 8, "float32")
    narrow = Layer("l.4.attn", 4, 0, GroupKind.MLA, 64, 1, 40, "bfloat16")
    for layers in (
        [full], [layer for layer in made if layer.number != 2], [layer for layer in made if layer.kind != "indexer"],
        [narrow, *(layer for layer in made if layer.number != 4)],
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            plan_planes(layers, model="m", shards=1, shard=0)


@pytest.mark.parametrize(("ranks", "shards", "writers"), [(4, 2, (0, None, 1, None)), (2, 2, (0, 1)), (4, 1, (0,))])
def test_so_many_workers_write_as_the_options_say(ranks, shards, writers):
    options = ConnectorOptions(port=0, form="planes", shards=shards)
    for rank, shard in enumerate(writers):
        place = Place("w", "m", rank, ranks, 1, 100)
        worker = Worker(options, place, caches("fp8_ds_mla"), CPU, most_tokens=64)
        assert worker.layout.shards == shards
        assert (worker._pump is not None) == (shard is not None)
        if worker._pump is not None:
            assert (worker._pump._rank, worker._pump._writers) == (shard, shards)
        worker.close()
    with pytest.raises(ConfigError, match="3 workers"):
        Worker(
            ConnectorOptions(port=0, form="planes", shards=2),
            Place("w", "m", 0, 3, 1, 100),
            caches("bfloat16"),
            CPU,
            most_tokens=64,
        )
