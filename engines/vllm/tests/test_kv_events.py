"""vLLM's KV events: the stream of numbered batches, and the sockets, against a publisher that behaves as vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from pdhub_vllm import kv_feed
from pdhub_vllm.config import KVEventsConfig
from pdhub_vllm.kv_events import EventStream
from pdhub_vllm.kv_feed import ZmqFeed, ranked

from pdhub.api import BlocksRemoved, BlocksStored, CacheEvent, CacheReset

LOST, EMPTY = CacheReset(empty=False), CacheReset(empty=True)


def packed(*events: Any, as_map: bool = False) -> bytes:
    """A batch as 0.26 to 0.33 pack it, or as a map."""
    batch = {"ts": 1.0, "events": list(events), "data_parallel_rank": 0} if as_map else [1.0, list(events), 0]
    return msgspec.msgpack.encode(batch)


def stored(name: int, parent: int | None = None, **more: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": [name], "parent_block_hash": parent, "token_ids": [1, 2]}
    return event | {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0} | more


def block(name: int, parent: int | None = None) -> BlocksStored:
    return BlocksStored((name,), parent, (1, 2), 2)


@pytest.mark.parametrize("as_map", [False, True])
def test_batches_are_read_in_every_form(as_map: bool) -> None:
    listed = ["BlockStored", [8], 7, [1, 2], 2, None, "GPU"]
    removed = {"type": "BlockRemoved", "block_hashes": [7, b"full hash"], "medium": "GPU"}
    payload = packed(stored(7), listed, removed, {"type": "AllBlocksCleared"}, ["AllBlocksCleared"], as_map=as_map)
    told = EventStream(replays=False).live(0, payload)
    assert told == [EMPTY, block(7), block(8, 7), BlocksRemoved((7, b"full hash")), EMPTY, EMPTY]


@pytest.mark.parametrize(
    "more",
    [
        {"medium": "CPU"},
        {"group_idx": 1},
        {"lora_id": 3},
        {"lora_name": "adapter"},
        {"extra_keys": [["salt"]]},
        {"locality": "REMOTE"},
        {"ownership": "tier-2"},
    ],
)
def test_blocks_that_tokens_alone_do_not_name_are_left_out(more: dict[str, Any]) -> None:
    assert EventStream(replays=False).live(0, packed(stored(7, **more))) == [EMPTY]


def test_events_of_later_versions_say_nothing() -> None:
    assert EventStream(replays=False).live(0, packed({"type": "BlockMoved", "block_hashes": [1]})) == [EMPTY]
    assert EventStream(replays=False).live(0, packed(stored(7, lookahead_token_ids=[3], extra_keys=[None]))) == [
        EMPTY,
        block(7),
    ]


leaves = st.none() | st.booleans() | st.integers(-5, 1 << 62) | st.sampled_from(["BlockStored", "BlockRemoved", "x"])
keys = st.sampled_from(["type", "events", "block_hashes", "token_ids", "block_size"])
shapes = st.recursive(leaves, lambda some: st.lists(some, max_size=4) | st.dictionaries(keys, some), max_leaves=12)


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=40) | shapes.map(msgspec.msgpack.encode))
def test_whatever_comes_it_does_not_raise_and_stays_in_step(payload: bytes) -> None:
    stream = EventStream(replays=False)
    assert stream.live(0, payload)[0] == EMPTY
    assert stream.live(1, packed(stored(7))) == [block(7)]


def test_a_batch_that_cannot_be_read_is_one_that_was_missed() -> None:
    for bad in (b"", b"\xc1", packed({"type": "BlockStored"}), msgspec.msgpack.encode([1.0]), packed(3)):
        assert EventStream(replays=False).live(0, bad) == [EMPTY, LOST]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_however_batches_are_lost_what_is_told_is_true(data: st.DataObject) -> None:
    """A publisher that restarts, a wire that drops, a replay that remembers only the last few: whoever follows what is
    told never believes that something is stored which is not, and knows everything when nothing was lost for good."""
    replays = data.draw(st.booleans())
    stream = EventStream(replays=replays)
    buffer: list[tuple[int, bytes]] = []
    truth: set[int] = set()
    believed: set[int] = set()
    complete = False
    number = name = 0

    def take(events: Sequence[CacheEvent]) -> None:
        nonlocal complete
        for event in events:
            match event:
                case CacheReset():
                    believed.clear()
                    complete = event.empty
                case BlocksStored():
                    believed.update(event.names)  # type: ignore[arg-type]
                case BlocksRemoved():
                    believed.difference_update(event.names)  # type: ignore[arg-type]

    for action in data.draw(st.lists(st.sampled_from(["store", "remove", "lose", "clear", "restart"]), max_size=25)):
        if action == "restart":
            number, buffer, truth = 0, [], set()
            action = "store"  # a new process is noticed by its first event
        if action == "clear":
            truth = set()
            payload = packed({"type": "AllBlocksCleared"})
        elif action == "remove" and truth:
            gone = data.draw(st.sampled_from(sorted(truth)))
            truth.discard(gone)
            payload = packed({"type": "BlockRemoved", "block_hashes": [gone], "medium": "GPU"})
        else:
            name += 1
            truth.add(name)
            payload = packed(stored(name))
        buffer.append((number, payload))
        if action != "lose":
            take(stream.live(number, payload))
            if stream.missing is not None:
                kept = data.draw(st.integers(1, 30))
                for old, batch in buffer[-kept:]:
                    if old >= stream.missing:
                        take(stream.replayed(old, batch))
                take(stream.replay_ended())
            assert believed <= truth
            assert believed == truth or not complete
        number += 1


def test_ports_of_ranks() -> None:
    assert [ranked("tcp://h:5557", rank) for rank in (0, 3)] == ["tcp://h:5557", "tcp://h:5560"]
    assert ranked("ipc:///tmp/x", 2) == "ipc:///tmp/x"
    for wrong in ("tcp://*:5557", "h:5557", "tcp://h:0", "http://h:1"):
        with pytest.raises(ValueError, match="endpoint"):
            KVEventsConfig(endpoint=wrong)


class Publisher:
    """As vLLM's: PUB, and a ROUTER that replays what it remembers. Some versions send the topic with it."""

    def __init__(self, *, topic: bool, remembers: int = 1000) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        self.ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self.pub, self.router)]
        self.buffer: list[tuple[bytes, bytes]] = []
        self.number = 0
        self.asked: list[int] = []
        self._topic = topic
        self._remembers = remembers
        self._task = asyncio.create_task(self._serve())

    async def say(self, *events: Any, lost: bool = False) -> None:
        number, payload = self.number.to_bytes(8, "big"), packed(*events)
        self.number += 1
        self.buffer = [*self.buffer, (number, payload)][-self._remembers :]
        if not lost:
            await self.pub.send_multipart([b"", number, payload])

    async def _serve(self) -> None:
        while True:
            client, empty, start = await self.router.recv_multipart()
            assert empty == b""
            self.asked.append(int.from_bytes(start, "big"))
            topic = [b""] if self._topic else []
            for number, payload in self.buffer:
                if number >= start:
                    await self.router.send_multipart([client, b"", *topic, number, payload])
            end = (-1).to_bytes(8, "big", signed=True)
            await self.router.send_multipart([client, b"", *topic, end, b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.context.destroy(0)


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not what():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("topic", [True, False])
async def test_over_sockets_what_was_missed_is_replayed(topic: bool) -> None:
    publisher = Publisher(topic=topic)
    await publisher.say(stored(1))  # before anybody listened
    told: list[CacheEvent] = []
    urls = [f"tcp://127.0.0.1:{port}" for port in publisher.ports]
    task = asyncio.create_task(ZmqFeed(urls[0], urls[1], "").run(told.extend))
    try:
        await until(lambda: told == [EMPTY, block(1)])
        await publisher.say(stored(2, 1), lost=True)
        while len(told) < 4:  # a subscription takes effect some time after it was asked for
            await publisher.say(stored(3, 2))
            await asyncio.sleep(0.02)
        assert told[:4] == [EMPTY, block(1), block(2, 1), block(3, 2)]
        assert LOST not in told
        assert publisher.asked[:2] == [0, 1]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await publisher.close()


async def test_a_replay_that_nobody_answers_leaves_the_past_unknown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_feed, "REPLAY_WAIT_S", 0.05)
    publisher = Publisher(topic=True)
    told: list[CacheEvent] = []
    task = asyncio.create_task(
        ZmqFeed(f"tcp://127.0.0.1:{publisher.ports[0]}", "tcp://127.0.0.1:9", "").run(told.extend)
    )
    try:
        publisher.number = 5
        while not told:
            await publisher.say(stored(1))
            await asyncio.sleep(0.02)
        assert told[0] == LOST
        assert "unknown" in caplog.text
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await publisher.close()
