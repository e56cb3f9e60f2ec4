"""Clients that leave during long prefills cost the next one less than a chunk of work.

Work is counted in tokens whose KV the prefill instance has stored, as its own KV events tell them: each step of vLLM
computes at most one chunk, of whatever prompts, and then says which blocks it has filled. So no clock is needed.
"""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest
from pdhub_vllm.kv_feed import ZmqFeed

from pdhub.api import BlocksStored

pytestmark = pytest.mark.world("smol")
LEAVING, LONG, SHORT = 10, 1900, 140


class Work:
    """Tokens that the instance has computed and stored, by the prompts that they belong to."""

    def __init__(self) -> None:
        self.stored: list[BlocksStored] = []

    def told(self, events) -> None:
        self.stored += [event for event in events if isinstance(event, BlocksStored)]

    def tokens(self, prompt: list[int] | None = None) -> int:
        """Of all prompts but this one."""
        mine = set() if prompt is None else {prompt[0]}
        return sum(len(event.token_ids) for event in self.stored if not mine & set(event.token_ids))


@pytest.fixture
async def work(world):
    (instance,) = [p for p in world.data["prefill"] if p["name"] == "prefill-pull"]
    at = instance["engine"]["config"]["kv_events"]["prefill-pull"]
    found = Work()
    task = asyncio.create_task(ZmqFeed(at["endpoint"], at["replay"], "").run(found.told))
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def client(world):
    async with aiohttp.ClientSession(world.router_url, headers=world.via("pull")) as session:
        yield session


def prompts(count: int, length: int, first: int):
    """Prompts that share no block with any other: each uses an id of its own only where it begins, and chance else."""
    rng = random.Random()
    return [[first + i, *(rng.randrange(1000, 40_000) for _ in range(length - 1))] for i in range(count)]


async def ask(client, prompt, stream=False, tokens=1):
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    async with client.post("/v1/completions", json=body) as reply:
        await reply.read()
        return reply.status


async def until(what, why):
    async with asyncio.timeout(120):
        while not what():
            await asyncio.sleep(0.002)
    assert what(), why


async def settled(world, work):
    """Nothing runs at the instance, and everything that it computed has been told."""
    while not await asyncio.to_thread(world.server("prefill-pull").idle):
        await asyncio.sleep(0.05)
    before = -1
    while before != work.tokens():
        before = work.tokens()
        await asyncio.sleep(0.3)


@pytest.mark.parametrize("stream", [False, True])
async def test_ten_clients_that_leave_cost_less_than_a_chunk(world, work, client, stream):
    chunk, block = world.kind.chunk, world.kind.block
    assert await ask(client, prompts(1, LONG, 100)[0]) == 200
    await until(lambda: work.tokens() >= LONG - block, "the events of a long prompt have come")
    await settled(world, work)

    long = prompts(LEAVING, LONG, 200)
    start = work.tokens()
    leaving = [asyncio.create_task(ask(client, prompt, stream, 40)) for prompt in long]
    await until(lambda: work.tokens() > start, "the first of them is being computed")
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    left = work.tokens()
    short = prompts(1, SHORT, 300)[0]
    assert await ask(client, short) == 200
    before_it = work.tokens(short) - left
    await settled(world, work)
    after_it = work.tokens(short) - left
    print(f"computed after {LEAVING} × {LONG} had left: {before_it} before the next answer, {after_it} in all")
    assert work.tokens(short) < work.tokens(), "the short prompt was computed too"
    # The chunk that was under way when they left is what nobody can take back.
    assert before_it <= chunk
    assert after_it <= chunk + block
    assert left - start <= LONG, "it did not compute them all anyway"
