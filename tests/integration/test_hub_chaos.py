"""Pools that slow down, nodes that freeze, metrics that stop: within two seconds of traffic the policy moves on, and it
moves back when they recover."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdhub.api import EngineLoad
from pdhub.core.latency import Tuning
from pdhub.router.server import RouterServer
from pdhub.testing.hub import MODEL, Hub, toy_topology

pytestmark = pytest.mark.integration

TOKENS = 8
TOKEN_MS = 20.0
TARGETS = {"x-slo-tpot-ms": "65", "x-slo-ttft-ms": "2000"}
MOVES_S = 2.0
SLACK_S = 1.0
"""For a machine that does other things too."""


def chaotic(**sections: Any) -> dict[str, Any]:
    """Two equal pools; the policy prefers ``general``, which is cheaper."""
    config = toy_topology(
        fast={"slots": 4, "token_ms": TOKEN_MS}, general={"slots": 4, "token_ms": TOKEN_MS}, **sections
    )
    config["policy"] = {"type": "slo"}
    config["pools"][0]["cost"] = 2.0
    seed = {"ttft_ms": 50, "tpot_ms": TOKEN_MS, "output_tokens": TOKENS}
    for pool in config["pools"]:
        pool["latency"] = seed
    return config


def set_token_ms(hub: Hub, node: str, token_ms: float) -> None:
    engine: Any = hub.nodes[node].receiver.engine
    engine._config = engine._config.model_copy(update={"token_ms": token_ms})


class Traffic:
    """What the last requests were: (when they began, pool, node, status)."""

    def __init__(self) -> None:
        self.began: deque[tuple[float, str | None, str | None, int]] = deque(maxlen=10_000)

    def since(self, at: float, place: int = 1) -> Counter[str | None]:
        return Counter(entry[place] for entry in self.began if entry[0] >= at)  # type: ignore[misc]

    async def until_mostly(self, name: str, limit_s: float, place: int = 1, window: int = 8) -> float:
        """Until of the last ``window`` requests seven in eight began at this pool (or node); how long that took."""
        start = time.monotonic()
        while True:
            recent = [e[place] for e in list(self.began)[-window:] if e[0] >= start]
            took = time.monotonic() - start
            if len(recent) == window and recent.count(name) >= 0.85 * window:
                return took
            assert took < limit_s, f"after {took:.1f} s still {Counter(recent)}"
            await asyncio.sleep(0.02)


@asynccontextmanager
async def traffic(hub: Hub, every_s: float = 0.1) -> AsyncIterator[Traffic]:
    """An open loop of short requests with targets: arrivals do not wait for answers."""
    seen, numbers, tasks = Traffic(), itertools.count(), set()

    async def one() -> None:
        began = time.monotonic()
        body = {"model": MODEL, "prompt": f"prompt {next(numbers)}", "max_tokens": TOKENS, "ignore_eos": True}
        async with hub.stream(body, headers=TARGETS) as reply:
            headers = reply.headers
            seen.began.append((began, headers.get("x-pdhub-pool"), headers.get("x-pdhub-node"), reply.status))
            await reply.read()

    async def arrivals() -> None:
        while True:
            task = asyncio.create_task(one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(every_s)

    source = asyncio.create_task(arrivals())
    try:
        yield seen
    finally:
        source.cancel()
        left = list(tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(source, *left, return_exceptions=True)


async def test_a_pool_that_is_five_times_slower_is_left_and_found_again(hub) -> None:
    running = await hub.start(chaotic())
    running.router.context.fleet.latency._tuning = Tuning(stale_s=2.0)
    async with traffic(running) as seen:
        await seen.until_mostly("general", 5.0)
        set_token_ms(running, "general-0", 5 * TOKEN_MS)
        assert await seen.until_mostly("fast", 8.0) < MOVES_S + SLACK_S
        set_token_ms(running, "general-0", TOKEN_MS)
        await seen.until_mostly("general", 15.0)
    assert await running.leaks() == {}


async def test_a_frozen_node_gets_nothing_new(hub) -> None:
    running = await hub.start(chaotic(general_nodes=2))
    async with traffic(running) as seen:
        await seen.until_mostly("general", 5.0)
        set_token_ms(running, "general-1", 6000.0)
        frozen = time.monotonic()
        await asyncio.sleep(MOVES_S + 1.5)
        late = seen.since(frozen + MOVES_S, place=2)
        assert late["general-1"] <= 0.1 * sum(late.values()), late
        assert sum(late.values()) >= 8
        set_token_ms(running, "general-1", TOKEN_MS)


async def test_a_whole_frozen_pool_is_left(hub) -> None:
    running = await hub.start(chaotic())
    async with traffic(running) as seen:
        await seen.until_mostly("general", 5.0)
        set_token_ms(running, "general-0", 6000.0)
        assert await seen.until_mostly("fast", 8.0) < MOVES_S + SLACK_S
        set_token_ms(running, "general-0", TOKEN_MS)


async def test_stale_metrics_are_not_believed_for_ever(hub) -> None:
    """The last word of a node was that it is full; then it says nothing more."""
    running = await hub.start(chaotic())
    context = running.router.context
    async with traffic(running) as seen:
        await seen.until_mostly("general", 5.0)
        node = context.fleet.pools["general"].nodes["general-0"]
        await running.router._prober.close()
        node.told(EngineLoad(running=4, waiting=500), context.clock())
        context.fleet.changed(node)
        assert await seen.until_mostly("fast", 8.0) < MOVES_S + SLACK_S
        await seen.until_mostly("general", 8.0)


async def test_two_routers_on_one_fleet_serve_everybody_without_a_herd(hub) -> None:
    """Neither knows what the other sends; nodes that are full refuse claims, and every request still gets its turn."""
    config = chaotic(general_nodes=3, admission={"queue_limit": 64})
    running = await hub.start(config)
    second = RouterServer(running.plan)
    await second.start()
    try:
        async with asyncio.timeout(20):
            while any(not e.info for e in second.context.fleet.endpoints()):
                await asyncio.sleep(0.02)
        urls = [running.url, second.url]

        async def one(n: int) -> tuple[int, str]:
            body = {"model": MODEL, "prompt": f"prompt {n}", "max_tokens": TOKENS, "ignore_eos": True}
            async with running.http.post(urls[n % 2] + "/v1/completions", json=body) as reply:
                await reply.read()
                return reply.status, reply.headers["x-pdhub-node"]

        answers = await asyncio.gather(*(one(n) for n in range(80)))
        assert {status for status, _ in answers} == {200}
        shares = Counter(node for _, node in answers)
        assert max(shares.values()) <= 0.5 * len(answers), shares
        assert not any(second.context.gate.waiting().values())
    finally:
        await second.close()
    assert await running.leaks() == {}
