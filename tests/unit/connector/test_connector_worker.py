"""Which worker writes what, and what routers are told."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

torch = pytest.importorskip("torch")

from pdhub.api import ConfigError, GroupKind  # noqa: E402
from pdhub.connector.gather import Physical  # noqa: E402
from pdhub.connector.layouts import Layer  # noqa: E402
from pdhub.connector.options import ConnectorOptions, read_options  # noqa: E402
from pdhub.connector.source import Cache  # noqa: E402
from pdhub.connector.steps import Advance, End, Start, Step  # noqa: E402
from pdhub.connector.worker import Place, Worker  # noqa: E402
from pdhub.transports.plugin import ShmConfig  # noqa: E402
from pdhub.transports.shm import ShmTransport  # noqa: E402
from pdhub.wire.control import Done, Join  # noqa: E402
from tests.unit.sender.fakenode import FakeNode, until  # noqa: E402

BLOCKS, TOKENS, DIM = 6, 16, 4


def worker(rank, ranks, kv_heads, kind=GroupKind.FULL, **more):
    heads = max(1, kv_heads // ranks)
    layers = {}
    for i in range(2):
        if kind is GroupKind.MLA:
            tensor = torch.arange(BLOCKS * TOKENS * DIM, dtype=torch.float32).view(BLOCKS, 1, TOKENS, DIM)
            layer = Layer(f"l.{i}", i, 0, kind, TOKENS, 1, DIM, "float32")
        else:
            tensor = torch.zeros(BLOCKS, heads, TOKENS, 2 * DIM) + rank
            layer = Layer(f"l.{i}", i, 0, kind, TOKENS, heads, DIM, "float32")
        layers[layer.name] = (layer, Cache(tensor, physical=Physical.PACKED))
    place = Place(f"w{rank}", "m", rank, ranks, kv_heads, 100, sampling_defaults={"top_p": 0.9}, eos_token_ids=(2,))
    return Worker(ConnectorOptions(port=0, **more), place, layers, torch.device("cpu"), most_tokens=64)


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "kind", "shards", "writers"),
    [
        (1, 4, GroupKind.FULL, 1, [0]),
        (2, 4, GroupKind.FULL, 2, [0, 1]),
        (4, 2, GroupKind.FULL, 2, [0, None, 1, None]),
        (2, 1, GroupKind.FULL, 1, [0, None]),
        (4, 1, GroupKind.MLA, 1, [0, None, None, None]),
    ],
)
def test_each_shard_has_one_writer(ranks, kv_heads, kind, shards, writers):
    workers = [worker(rank, ranks, kv_heads, kind) for rank in range(ranks)]
    try:
        node = FakeNode(workers[0].layout, transport=ShmTransport(ShmConfig()))
        assert {w.layout.fingerprint for w in workers} == {node.layout.fingerprint}
        assert workers[0].layout.shards == shards
        start = Start("r", node.params(), 20)
        for one in workers:
            one.begin(Step(starts=(start,)))
            one.computed(Step(advances=(Advance("r", ((3, 1),), True, 0, 20),)))
            one.begin(Step(ends=(End("r", True, True),)))
        wanted = [rank for rank in writers if rank is not None]
        until(lambda: len(node.got(Done)) == len(wanted), "every writer's done")
        assert sorted((join.rank, join.writers) for join in node.got(Join)) == [(rank, shards) for rank in wanted]
        for one in workers:
            seen: set[str] = set()
            until(lambda one=one, seen=seen: seen.update(one.released()) or seen == {"r"}, "released by each")
            assert one.report() is None
        node.close()
    finally:
        for one in workers:
            one.close()


def test_routers_are_told_by_the_first_rank():
    first, second = worker(0, 2, 2), worker(1, 2, 2)
    try:
        assert second.port == 0
        with urllib.request.urlopen(f"http://127.0.0.1:{first.port}/prefill") as reply:
            told = json.load(reply)
        assert told["fingerprint"] == first.layout.fingerprint
        assert (told["transport"], told["eos_token_ids"], told["sampling_defaults"]) == ("shm", [2], {"top_p": 0.9})
        assert told["max_model_len"] == 100
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{first.port}/nothing")
        assert caught.value.code == 404
        caught.value.close()
    finally:
        first.close()
        first.close()
        second.close()


def test_options_that_are_unknown_or_wrong_name_their_key():
    assert read_options({}).transport == "shm"
    with pytest.raises(ConfigError) as caught:
        read_options({"chunk_token": 3})
    assert "chunk_token" in str(caught.value.where)
    with pytest.raises(ConfigError):
        read_options({"port": -1})
