"""Processes die or freeze in the middle of requests: the client is told in time, the rest goes on, and no hand is
needed to recover."""

import asyncio
import json
import signal
import time

import aiohttp
import pytest

from pdhub.testing import toy
from pdhub.testing.hub import toy_topology

pytestmark = pytest.mark.e2e

IDLE_S = 2.0
PROMPT = "x" * 64


def topology(**changes):
    general = {"slots": 4, "chunk_tokens": 16, "token_ms": 20, "max_context": 2048}
    data = toy_topology(
        fast=general | {"slots": 1},
        general=general,
        prefill={"chunk_tokens": 16, "chunk_ms": changes.pop("chunk_ms", 0.0), "max_context": 2048},
        router={"idle_timeout_s": IDLE_S, "first_byte_timeout_s": 4.0, "retries": 0, "breaker_open_s": 0.5},
        handoff={"deadline_s": 4.0, "claim_ttl_s": 4.0, "ready_ttl_s": 4.0, "fence_within_s": 2.0},
        **changes,
    )
    data["plugins"] = {"modules": ["pdhub.testing.toy"]}
    return data


@pytest.fixture
def up(tree, tmp_path):
    def start(**changes):
        data = topology(**changes)
        data["model"]["tokenizer"] = str(toy.write_tokenizer(tmp_path / "tokenizer"))
        one = tree(data)
        one.start_all()
        return one

    return start


class Client:
    """One streaming request, read in a task, with the time of each event."""

    def __init__(self, session, url, *, max_tokens=1500, tpot_ms=None, prompt=PROMPT, stream=True):
        self.first = asyncio.Event()
        self.bytes = b""
        self.status = 0
        self.ended_at = 0.0
        self.failed: BaseException | None = None
        body = {"model": "toy", "prompt": prompt, "max_tokens": max_tokens, "stream": stream}
        headers = {} if tpot_ms is None else {"x-slo-tpot-ms": str(tpot_ms)}
        self.task = asyncio.create_task(self._run(session, url, body, headers))

    async def _run(self, session, url, body, headers):
        try:
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
                self.status = reply.status
                async for piece in reply.content.iter_any():
                    self.bytes += piece
                    self.first.set()
        except aiohttp.ClientError as error:
            self.failed = error
        finally:
            self.ended_at = time.monotonic()
            self.first.set()

    @property
    def error(self):
        """The error that the client was told: of a document, or of the stream's last event."""
        if self.status >= 400:
            return json.loads(self.bytes)["error"]
        for line in self.bytes.decode().splitlines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return event["error"]
        return None


async def answer(session, url, prompt="after", tpot_ms=None, max_tokens=5):
    client = Client(session, url, max_tokens=max_tokens, prompt=prompt, tpot_ms=tpot_ms, stream=False)
    await client.task
    text = json.loads(client.bytes)["choices"][0]["text"] if client.status == 200 else None
    return client.status, text


async def eventually_right(session, url, timeout_s=20, **kwargs):
    want = bytes(toy.generate(b"after", 5)).decode()
    deadline = time.monotonic() + timeout_s
    while True:
        status, text = await answer(session, url, **kwargs)
        if status == 200 or time.monotonic() > deadline:
            assert (status, text) == (200, want)
            return
        await asyncio.sleep(0.1)


@pytest.fixture
async def session():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as one:
        yield one


async def test_a_killed_node_fails_its_streams_and_no_others(up, session):
    tree = up()
    doomed = [Client(session, tree.url) for _ in range(2)]
    spared = Client(session, tree.url, tpot_ms=5, max_tokens=150)
    for client in (*doomed, spared):
        await asyncio.wait_for(client.first.wait(), 20)
    killed_at = time.monotonic()
    tree.kill("general-0")
    await asyncio.wait_for(asyncio.gather(*(c.task for c in doomed)), 10)
    for client in doomed:
        assert client.error is not None, client.bytes[-300:]
        assert client.ended_at - killed_at < 2.0
        assert b"[DONE]" not in client.bytes
    await asyncio.wait_for(spared.task, 20)
    assert spared.error is None
    status, _ = await answer(session, tree.url)
    assert status in (200, 502, 503)
    tree.start("general-0")
    await asyncio.to_thread(tree.wait_up, "general-0")
    await eventually_right(session, tree.url)
    assert await asyncio.to_thread(tree.leaks) == {}


async def test_a_killed_prefill_is_told_and_frees_the_landing(up, session):
    tree = up(chunk_ms=200.0)
    client = Client(session, tree.url, stream=False)
    await asyncio.sleep(0.4)
    assert tree.load("general-0")["leases"]
    killed_at = time.monotonic()
    tree.kill("prefill-0")
    await asyncio.wait_for(client.task, 10)
    assert client.status == 502, client.bytes
    assert client.ended_at - killed_at < 2.0
    assert await asyncio.to_thread(tree.leaks) == {}
    tree.start("prefill-0")
    await eventually_right(session, tree.url)


async def test_a_frozen_node_is_told_within_the_idle_timeout(up, session):
    tree = up()
    client = Client(session, tree.url)
    await asyncio.wait_for(client.first.wait(), 20)
    frozen_at = time.monotonic()
    tree.signal("general-0", signal.SIGSTOP)
    await asyncio.wait_for(client.task, 20)
    assert client.error is not None, client.bytes[-300:]
    assert client.ended_at - frozen_at < IDLE_S + 2.0
    spared = await answer(session, tree.url, tpot_ms=5)
    assert spared[0] == 200
    tree.signal("general-0", signal.SIGCONT)
    await eventually_right(session, tree.url)
    assert await asyncio.to_thread(tree.leaks) == {}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_frozen_writer_that_resumes_changes_nothing(up, session, transport):
    tree = up(chunk_ms=150.0, transport=transport)
    client = Client(session, tree.url, stream=False, prompt="y" * 200)
    await asyncio.sleep(0.5)
    assert tree.load("general-0")["leases"]
    frozen_at = time.monotonic()
    tree.signal("prefill-0", signal.SIGSTOP)
    await asyncio.wait_for(client.task, 20)
    assert client.status in (502, 504), client.bytes
    assert client.ended_at - frozen_at < 4.0 + 2.0
    assert await asyncio.to_thread(tree.leaks) == {}
    tree.signal("prefill-0", signal.SIGCONT)
    await eventually_right(session, tree.url)
    for _ in range(10):
        await eventually_right(session, tree.url)
    assert await asyncio.to_thread(tree.leaks) == {}


async def test_a_killed_router_leaves_nothing_claimed(up, session):
    tree = up(chunk_ms=50.0)
    clients = [Client(session, tree.url, tpot_ms=5 if n % 2 else None) for n in range(4)]
    await asyncio.wait_for(clients[0].first.wait(), 20)
    tree.kill("router")
    await asyncio.wait_for(asyncio.gather(*(c.task for c in clients)), 10)
    assert all(c.failed is not None for c in clients), [(c.status, c.bytes[-80:]) for c in clients]
    assert await asyncio.to_thread(tree.leaks) == {}
    tree.start("router")
    await asyncio.to_thread(tree.wait_ready)
    await eventually_right(session, tree.url)
