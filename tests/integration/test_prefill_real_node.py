"""Prefill instance → real transport → real node, without a router: the toy's answer proves every byte."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from pdhub.node.decode import NodeServer
from pdhub.node.prefill import PrefillServer
from pdhub.testing import toy
from pdhub.transports.plugin import pdhub_register_transports
from tests.unit.prefill_host.planned import make_plan
from tests.unit.sender.fakenode import until

pytestmark = pytest.mark.integration

OPTIONS = {"chunk_tokens": 16, "slots": 4}
CONFIG = toy.ToyConfig(**OPTIONS)
TRANSPORTS = {spec.name: spec for spec in pdhub_register_transports()}


class Pair:
    """One prefill instance and one node, and the calls that a router makes."""

    def __init__(self, prefill: PrefillServer, node: NodeServer, http: aiohttp.ClientSession) -> None:
        self.prefill, self.node, self.http = prefill, node, http

    async def claim(self, transfer_id: str, tokens: int, max_tokens: int) -> tuple[int, dict[str, Any]]:
        body = {
            "transfer_id": transfer_id, "request_id": transfer_id, "tokens": tokens, "max_tokens": max_tokens,
            "fingerprint": CONFIG.layout().fingerprint,
        }  # fmt: skip
        async with self.http.post(f"{self.node.url}/claim", json=body) as reply:
            return reply.status, await reply.json()

    async def leg(self, claim: dict[str, Any], prompt: str) -> tuple[int, dict[str, Any]]:
        params = {k: claim[k] for k in ("transfer_id", "generation", "host", "port", "fingerprint")}
        body = {
            "model": "toy", "prompt": prompt, "max_tokens": 1, "return_token_ids": True,
            "kv_transfer_params": {"pdhub": params},
        }  # fmt: skip
        async with self.http.post(f"{self.prefill.url}/v1/completions", json=body) as reply:
            return reply.status, await reply.json()

    async def decode(self, claim: dict[str, Any], answer: dict[str, Any], max_tokens: int) -> list[int]:
        choice = answer["choices"][0]
        body = {
            "transfer_id": claim["transfer_id"], "generation": claim["generation"], "request_id": "r",
            "prompt_token_ids": choice["prompt_token_ids"], "first_token": choice["token_ids"][0],
            "max_tokens": max_tokens, "sampling": {"temperature": 0.0},
        }  # fmt: skip
        tokens: list[int] = []
        async with self.http.post(f"{self.node.url}/decode", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                frame = json.loads(line)
                assert "error" not in frame, frame
                tokens += frame.get("t", [])
        return tokens

    async def whole(self, transfer_id: str, prompt: str, max_tokens: int = 8) -> list[int]:
        status, claim = await self.claim(transfer_id, len(prompt) + 3, max_tokens)
        assert status == 200, claim
        status, answer = await self.leg(claim, prompt)
        assert status == 200, answer
        return await self.decode(claim, answer, max_tokens)

    async def load(self) -> dict[str, Any]:
        async with self.http.get(f"{self.node.url}/load") as reply:
            return dict(await reply.json())

    async def quiet(self) -> None:
        """Nothing is held on either side."""
        for _ in range(500):
            load = await self.load()
            stats = self.prefill.sender.stats()
            if not load["leases"] and not self.prefill.active and stats.slots_free == stats.slots:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"still held: {load}, {stats}, {self.prefill.active}")


@pytest.fixture(params=sorted(TRANSPORTS))
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    spec = TRANSPORTS[request.param]
    before = {t.ident for t in threading.enumerate()}
    files = len(os.listdir("/proc/self/fd"))
    plan = make_plan(prefill=OPTIONS, pool={**OPTIONS}, transport=spec, handoff={"verify": True})
    node = NodeServer(plan, "general", plan.config.pools[0].nodes[0])
    prefill = PrefillServer(plan, plan.config.prefill[0])
    await node.start()
    await prefill.start()
    async with aiohttp.ClientSession() as http:
        yield Pair(prefill, node, http)
    await prefill.close()
    await node.close()
    # one-shot threads may still be on their last line
    until(lambda: not [t for t in threading.enumerate() if t.ident not in before and t.name.startswith("pdhub")])
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 32, 33, 70])
async def test_the_answer_needs_every_byte(pair: Pair, length: int) -> None:
    prompt = "the quick brown fox jumps over the lazy dog and over it again, and again"[:length]
    assert await pair.whole("t", prompt) == toy.generate(prompt.encode(), 8, CONFIG)
    await pair.quiet()


async def test_many_at_once(pair: Pair) -> None:
    prompts = [f"prompt number {i} " * (1 + i % 5) for i in range(4)]
    answers = await asyncio.gather(*(pair.whole(f"t{i}", p) for i, p in enumerate(prompts)))
    assert answers == [toy.generate(p.encode(), 8, CONFIG) for p in prompts]
    await pair.quiet()


async def test_a_landing_that_is_too_small_says_what_is_needed(pair: Pair) -> None:
    _, claim = await pair.claim("t", 8, 8)
    status, body = await pair.leg(claim, "x" * 40)
    assert (status, body["error"]["code"], body["error"]["need"]) == (409, "landing_too_small", 40)


async def test_prompt_and_output_beyond_the_nodes_context(pair: Pair) -> None:
    _, claim = await pair.claim("t", 100, 500)
    status, body = await pair.leg(claim, "x" * 40)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "prompt")
    assert "540 tokens (40 in the messages, 500 in the completion)" in body["error"]["message"]


async def test_an_unknown_and_a_stale_transfer(pair: Pair) -> None:
    _, claim = await pair.claim("t", 64, 8)
    assert (await pair.leg({**claim, "transfer_id": "nobody"}, "hello"))[0] == 502
    assert (await pair.leg({**claim, "generation": claim["generation"] - 1}, "hello"))[0] == 502


async def test_a_cancelled_transfer_stops_the_prefill_and_frees_everything(pair: Pair) -> None:
    for i in range(10):
        _, claim = await pair.claim(f"t{i}", 400, 8)
        leg = asyncio.create_task(pair.leg(claim, "y" * 400))
        await asyncio.sleep(0.001 * i)
        async with pair.http.post(f"{pair.node.url}/cancel", json={"transfer_id": f"t{i}"}) as reply:
            assert reply.status == 200
        assert (await leg)[0] in (200, 502)
    await pair.quiet()
    assert await pair.whole("after", "hello") == toy.generate(b"hello", 8, CONFIG)


async def test_clients_that_leave_at_any_moment_leave_nothing(pair: Pair) -> None:
    for i in range(12):
        _, claim = await pair.claim(f"t{i}", 400, 8)
        leg = asyncio.create_task(pair.leg(claim, "z" * 400))
        await asyncio.sleep(0.002 * i)
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
        async with pair.http.post(f"{pair.node.url}/cancel", json={"transfer_id": f"t{i}"}) as reply:
            assert reply.status == 200
    await pair.quiet()


async def test_a_node_that_goes_away_and_comes_back(pair: Pair) -> None:
    _, claim = await pair.claim("t", 64, 8)
    await pair.node.close()
    status, body = await pair.leg(claim, "hello")
    assert (status, body["error"]["code"]) == (502, "transfer_failed")
    again = NodeServer(pair.node._plan, "general", pair.node._plan.config.pools[0].nodes[0])
    await again.start()
    pair.node = again
    try:
        assert await pair.whole("t2", "hello again") == toy.generate(b"hello again", 8, CONFIG)
    finally:
        await again.close()
