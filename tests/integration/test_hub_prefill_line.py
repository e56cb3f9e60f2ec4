"""More prompts than the prefill instance can compute: they wait in the router, the important ones first, and whoever
leaves, fails or is refused while it waits leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import pytest

from pdhub.testing.hub import MODEL, Hub, toy_topology

pytestmark = pytest.mark.integration

CHUNK_MS = 50.0
PROMPT = 64
"""Tokens: two chunks."""
CLASSES = {
    "high": {"ttft_ms": 3000, "priority": 5},
    "low": {"ttft_ms": 6000, "priority": -1},
    "calm": {"ttft_ms": 20_000},
}
LATE_S = 2.0
"""For a machine that does other things too."""


def topology(**sections: Any) -> dict[str, Any]:
    config = toy_topology(fast={"slots": 8}, general={"slots": 32}, prefill={"chunk_ms": CHUNK_MS}, **sections)
    # Nothing but the order protects the important ones: `leave` would shed others earlier.
    config["policy"] = {"type": "slo", "slo_classes": CLASSES, "config": {"leave": 1000}}
    config["pools"][0]["cost"] = 2.0
    for pool in config["pools"]:
        pool["latency"] = {"ttft_ms": 20, "tpot_ms": 2, "ttft_ms_per_token": 1.6, "output_tokens": 4}
    return config


def prompt(number: int) -> list[int]:
    return [97 + (number + place * place) % 26 for place in range(PROMPT)]


def idle(hub: Hub) -> bool:
    context = hub.router.context
    lines = context.lines.told().values()
    return (
        not any(context.gate.waiting().values())
        and not any(waiting or load for waiting, load, _ in lines)
        and not any(e.pending_tokens or e.in_flight for e in context.fleet.endpoints())
    )


async def settled(hub: Hub) -> None:
    async with asyncio.timeout(20):
        while not idle(hub):
            await asyncio.sleep(0.02)
    assert await hub.leaks() == {}


async def ask(hub: Hub, cls: str, number: int) -> tuple[str, int, str | None, float, float]:
    """Class, status, code, seconds to the first token, seconds in all."""
    body = {"model": MODEL, "prompt": prompt(number), "max_tokens": 3, "ignore_eos": True}
    start = time.monotonic()
    async with hub.stream(body, headers={"x-pdhub-slo-class": cls}) as reply:
        await reply.content.readany() if reply.status == 200 else None
        first = time.monotonic() - start
        code = None if reply.status == 200 else (await reply.json())["error"]["code"]
        await reply.read()
    return cls, reply.status, code, first, time.monotonic() - start


async def waits(hub: Hub, count: int) -> None:
    async with asyncio.timeout(20):
        while sum(waiting for waiting, *_ in hub.router.context.lines.told().values()) < count:
            await asyncio.sleep(0.005)


async def test_three_times_more_than_prefill_computes(hub) -> None:
    running = await hub.start(topology())
    start = time.monotonic()
    assert {(await ask(running, "calm", 900 + number))[1] for number in range(8)} == {200}
    capacity = 8 / (time.monotonic() - start)
    rng, tasks = random.Random(1), []
    end = time.monotonic() + 8.0

    async def arrivals(cls: str, rate: float) -> None:
        at = time.monotonic()
        while (at := at + rng.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.append(asyncio.create_task(ask(running, cls, len(tasks))))

    await asyncio.gather(arrivals("high", 0.4 * capacity), arrivals("low", 2.6 * capacity))
    outcomes = await asyncio.gather(*tasks)
    high = [o for o in outcomes if o[0] == "high"]
    attained = [o for o in high if o[1] == 200 and o[3] * 1000 <= CLASSES["high"]["ttft_ms"]]
    assert len(attained) >= 0.95 * len(high), sorted(o[3] for o in high)
    refused = [o for o in outcomes if o[1] != 200]
    assert {(o[0], o[1], o[2]) for o in refused} <= {("low", 429, "shed"), ("low", 429, "queue_timeout")}, Counter(
        o[:3] for o in refused
    )
    assert len(refused) > 0.3 * len(outcomes)
    assert all(o[4] <= CLASSES["low"]["ttft_ms"] / 1000 + LATE_S for o in refused)
    await settled(running)


async def test_the_important_overtake_those_that_wait(hub) -> None:
    running = await hub.start(topology(admission={"prefill_ahead_tokens": 1}))
    calm = [asyncio.create_task(ask(running, "calm", n)) for n in range(8)]
    await waits(running, 6)
    high = await ask(running, "high", 100)
    assert high[1] == 200
    assert sum(task.done() for task in calm) <= 4, "it did not wait for all of them"
    assert {o[1] for o in await asyncio.gather(*calm)} == {200}
    await settled(running)


async def test_nothing_is_held_at_a_node_while_a_prompt_waits(hub) -> None:
    running = await hub.start(topology(admission={"prefill_ahead_tokens": 1}))
    tasks = [asyncio.create_task(ask(running, "calm", n)) for n in range(8)]
    await waits(running, 6)
    loads = [await running.load(name) for name in running.nodes]
    assert sum(len(load["leases"]) for load in loads) <= 2, loads
    await asyncio.gather(*tasks)
    await settled(running)


async def test_clients_that_leave_while_they_wait(hub) -> None:
    running = await hub.start(topology(admission={"prefill_ahead_tokens": 1}, prefills=2))
    tasks = [asyncio.create_task(ask(running, "calm", n)) for n in range(24)]
    await waits(running, 16)
    rng = random.Random(2)
    for task in rng.sample(tasks, 16):
        task.cancel()
        await asyncio.sleep(rng.random() * 0.05)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert {o[1] for o in ended if not isinstance(o, BaseException)} == {200}
    await settled(running)


async def test_an_instance_that_goes_away_takes_nobody_with_it(hub) -> None:
    running = await hub.start(topology(admission={"prefill_ahead_tokens": 1}, prefills=2, router={"retries": 3}))
    tasks = [asyncio.create_task(ask(running, "calm", n)) for n in range(12)]
    await waits(running, 8)
    await running.prefills["prefill-1"].close()
    assert Counter(o[1] for o in await asyncio.gather(*tasks)) == {200: 12}
    await settled(running)
    assert running.router.context.lines.told()["prefill-1"][:2] == (0, 0)


async def test_drain_refuses_those_that_wait(hub) -> None:
    running = await hub.start(topology(admission={"prefill_ahead_tokens": 1}))
    tasks = [asyncio.create_task(ask(running, "calm", n)) for n in range(6)]
    await waits(running, 4)
    assert await running.router.drain(10)
    statuses = Counter(o[1] for o in await asyncio.gather(*tasks))
    assert statuses[503] >= 4
    assert set(statuses) == {200, 503}
    await settled(running)


async def test_metrics_and_explain_show_the_line(hub) -> None:
    running = await hub.start(topology(admission={"prefill_ahead_tokens": 1}))
    assert (await ask(running, "calm", 50))[1] == 200
    tasks = [asyncio.create_task(ask(running, "calm", n)) for n in range(8)]
    await waits(running, 6)
    async with running.http.get(f"{running.url}/metrics") as reply:
        text = await reply.text()
    values = {
        line.split(" ")[0]: float(line.split(" ")[1])
        for line in text.splitlines()
        if line.startswith("pdhub_router_prefill_")
    }
    assert values['pdhub_router_prefill_waiting{prefill="prefill-0"}'] >= 4
    assert values['pdhub_router_prefill_outstanding_tokens{prefill="prefill-0"}'] > 0
    assert values['pdhub_router_prefill_outstanding_limit_tokens{prefill="prefill-0"}'] == 1
    said = await running.post("/explain", {"model": MODEL, "prompt": prompt(99)}, {"x-pdhub-slo-class": "calm"})
    handoff = said.json["handoff"]
    assert handoff["prefill"] == "prefill-0"
    assert handoff["tokens_ahead"] > 0
    assert handoff["wait_ms"] > CHUNK_MS
    first = await running.post("/explain", {"model": MODEL, "prompt": prompt(99)}, {"x-pdhub-slo-class": "high"})
    assert first.json["handoff"]["tokens_ahead"] == 0
    await asyncio.gather(*tasks)
    await settled(running)
