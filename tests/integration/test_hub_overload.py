"""Three times more than the fleet can serve, for a few seconds: the important class keeps its targets, the sheddable
class bears the loss, everybody is told in time, and soon after all is as before. ``bench/overload.py`` is the long
version with real processes."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import pytest

from pdhub.testing.hub import MODEL, Hub, toy_topology

pytestmark = pytest.mark.integration

TOKENS = 11
QUEUE = 12
CLASSES = {
    "high": {"ttft_ms": 2000, "tpot_ms": 150, "priority": 5},
    "low": {"ttft_ms": 2000, "tpot_ms": 300, "priority": -1},
}
CAPACITY = 1 / 0.2 + 2 / 0.4
"""Requests a second: one slot with 20 ms a token, two with 40."""
SECONDS = 6.0
LATE_S = 0.2
"""For a machine that does other things too."""


@dataclass
class Outcome:
    cls: str
    status: int
    code: str | None
    total_s: float
    ttft_s: float


async def one(hub: Hub, cls: str, number: int) -> Outcome:
    body = {"model": MODEL, "prompt": f"{cls} {number}", "max_tokens": TOKENS, "ignore_eos": True}
    start = time.monotonic()
    async with hub.stream(body, headers={"x-pdhub-slo-class": cls}) as reply:
        await reply.content.readany() if reply.status == 200 else None
        ttft = time.monotonic() - start
        code = None if reply.status == 200 else (await reply.json())["error"]["code"]
        await reply.read()
    return Outcome(cls, reply.status, code, time.monotonic() - start, ttft)


async def test_three_times_the_capacity(hub) -> None:
    config = toy_topology(
        fast={"slots": 1, "token_ms": 20.0}, general={"slots": 2, "token_ms": 40.0}, admission={"queue_limit": QUEUE}
    )
    config["policy"] = {"type": "slo", "slo_classes": CLASSES}
    config["pools"][0]["cost"] = 2.0
    for pool, token_ms in zip(config["pools"], (20, 40), strict=True):
        pool["latency"] = {"ttft_ms": 60, "tpot_ms": token_ms, "output_tokens": TOKENS}
    running = await hub.start(config)
    gate, rng = running.router.context.gate, random.Random(1)
    tasks: list[asyncio.Task[Outcome]] = []
    longest = 0
    end = time.monotonic() + SECONDS
    rates = {"high": 0.4 * CAPACITY, "low": 2.6 * CAPACITY}

    async def arrivals(cls: str) -> None:
        nonlocal longest
        at = time.monotonic()
        while (at := at + rng.expovariate(rates[cls])) < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.append(asyncio.create_task(one(running, cls, len(tasks))))
            longest = max(longest, *gate.waiting().values())

    await asyncio.gather(*(arrivals(cls) for cls in CLASSES))
    outcomes = await asyncio.gather(*tasks)
    high = [o for o in outcomes if o.cls == "high"]
    attained = sum(o.status == 200 and o.ttft_s * 1000 <= CLASSES["high"]["ttft_ms"] for o in high)
    assert attained >= 0.95 * len(high), [o for o in high if o.status != 200]
    refused = [o for o in outcomes if o.status != 200]
    assert {(o.cls, o.status, o.code) for o in refused} <= {("low", 429, "shed"), ("low", 429, "queue_full")}
    assert len(refused) > 0.3 * len(outcomes)
    assert all(o.total_s <= CLASSES["low"]["ttft_ms"] / 1000 + LATE_S for o in refused)
    assert longest <= QUEUE + 4
    await asyncio.sleep(max(0.0, end + 2.0 - time.monotonic()))
    assert not any(gate.waiting().values())
    calm = [await one(running, cls, n) for n in range(3) for cls in CLASSES]
    assert {o.status for o in calm} == {200}
    assert await running.leaks() == {}
