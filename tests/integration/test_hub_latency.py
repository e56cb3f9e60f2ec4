"""The latency model in a whole router: it learns from traffic, notices a jump and a frozen node, and recovers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdhub.api.policy import Prediction
from pdhub.api.request import RequestView
from pdhub.testing.hub import MODEL, Hub, toy_topology

pytestmark = pytest.mark.integration

TOKENS = 24
GENERAL = {"slots": 8, "token_ms": 5.0}


def slow_down(hub: Hub, node: str, token_ms: float) -> None:
    engine = hub.nodes[node].receiver.engine
    engine._config = engine._config.model_copy(update={"token_ms": token_ms})  # type: ignore[attr-defined]


def seen(hub: Hub, pool: str, node: str) -> Prediction:
    context = hub.router.context
    view = RequestView("probe", MODEL, "/v1/completions", 8, max_tokens=TOKENS)
    return context.fleet.predict(view, pool, node, context.clock())


async def until(hub: Hub, node: str, low: float, high: float, limit_s: float) -> float:
    """Until its predicted TPOT is in the range, in milliseconds; how long that took."""
    start = time.monotonic()
    while True:
        tpot = seen(hub, "general", node).tpot_ms
        took = time.monotonic() - start
        if tpot is not None and low <= tpot <= high:
            return took
        assert took < limit_s, f"predicted TPOT is still {tpot} ms"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def traffic(hub: Hub, clients: int = 4) -> AsyncIterator[None]:
    """Clients that stream one short answer after the other."""
    numbers = itertools.count()

    async def client() -> None:
        while True:
            body = {"model": MODEL, "prompt": f"prompt {next(numbers)}", "max_tokens": TOKENS, "ignore_eos": True}
            async with hub.stream(body) as reply:
                await reply.read()

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_traffic_teaches_and_errors_are_reported(hub) -> None:
    running = await hub.start(toy_topology(general=GENERAL))
    assert seen(running, "general", "general-0").tpot_ms is None, "no seed, nothing seen"
    async with traffic(running):
        await until(running, "general-0", 4.0, 15.0, 5.0)
        await asyncio.sleep(0.5)
    assert await running.leaks() == {}
    async with running.http.get(f"{running.url}/debug/requests") as reply:
        records = (await reply.json())["requests"]
    record = next(r for r in records if r["outcome"] == "ok")  # the last ones were cut off, some before their prefill
    assert record["predicted_ttft_ms"] is not None
    assert 4.0 <= record["predicted_tpot_ms"] <= 20.0
    assert 1 <= record["concurrency"] <= 4
    told = record["extra"]
    assert 0 <= told["sent_ms"] <= told["prefill_sent_ms"] <= told["prefilled_ms"] <= record["ttft_ms"]
    async with running.http.get(f"{running.url}/metrics") as reply:
        text = await reply.text()
    ratio = 'pdhub_router_prediction_ratio{metric="tpot",pool="general",quantile="0.5"}'
    value = next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(ratio))
    assert 1.0 <= value < 3.0
    for name in ("prediction_error_seconds", "prediction_bias", "predictions_compared"):
        assert f'pdhub_router_{name}{{metric="ttft",pool="general"' in text


async def test_a_jump_and_the_way_back_are_noticed_within_two_seconds_of_traffic(hub) -> None:
    running = await hub.start(toy_topology(general=GENERAL))
    async with traffic(running):
        await until(running, "general-0", 4.0, 15.0, 5.0)
        slow_down(running, "general-0", 50.0)
        assert await until(running, "general-0", 30.0, 200.0, 6.0) < 3.0
        slow_down(running, "general-0", 5.0)
        assert await until(running, "general-0", 4.0, 15.0, 8.0) < 4.0


async def test_a_frozen_node_is_noticed_though_nothing_ends(hub) -> None:
    running = await hub.start(toy_topology(general=GENERAL, general_nodes=2))
    async with traffic(running):
        await until(running, "general-0", 4.0, 15.0, 5.0)
        await until(running, "general-1", 4.0, 15.0, 5.0)
        slow_down(running, "general-1", 6000.0)
        assert await until(running, "general-1", 500.0, 1e9, 6.0) < 3.0
        assert (seen(running, "general", "general-0").tpot_ms or 0) < 50.0, "the other one is as it was"


async def test_what_is_pending_and_remaining_is_seen_while_it_runs(hub) -> None:
    running = await hub.start(toy_topology(fast={"slots": 1, "token_ms": 20.0}, general=GENERAL))
    fleet = running.router.context.fleet
    body = {"model": MODEL, "prompt": "x", "max_tokens": 40, "ignore_eos": True}
    async with running.stream(body, headers={"x-slo-tpot-ms": "10"}) as reply:
        await reply.content.readany()
        await asyncio.sleep(0.2)
        node = fleet.snapshot(running.router.context.clock()).pools[0].nodes[0]
        assert (node.in_flight, node.slots, node.pending_tokens, node.tightest_tpot_ms) == (1, 1, 0, 10.0)
        assert 0 < (node.remaining_tokens or 0) < 40
        await reply.read()
    assert await running.leaks() == {}
    node = fleet.snapshot(running.router.context.clock()).pools[0].nodes[0]
    assert (node.in_flight, node.remaining_tokens, node.tightest_tpot_ms) == (0, 0, None)
    prefill = fleet.prefills["prefill-0"]
    assert (prefill.in_flight, prefill.pending_tokens) == (0, 0)
