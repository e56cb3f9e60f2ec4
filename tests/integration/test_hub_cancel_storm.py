"""A thousand requests, a random third of which leave at a random moment: everything is free afterwards, and no
token of one request shows up in another's answer."""

import asyncio
import random

import pytest

from pdhub.api import TransportSpec, hookimpl
from pdhub.testing import toy
from pdhub.testing.faults import Faults, FaultyTransport
from pdhub.testing.hub import toy_topology
from pdhub.transports.plugin import ShmConfig
from pdhub.transports.shm import ShmTransport

pytestmark = pytest.mark.integration

REQUESTS = 1000


@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_cancel_storm(hub, transport):
    count = REQUESTS if transport == "shm" else REQUESTS // 4
    fast = {"slots": 1, "chunk_tokens": 16, "token_ms": 1}
    general = {"slots": 8, "chunk_tokens": 16, "token_ms": 1}
    running = await hub.start(
        toy_topology(
            fast=fast, general=general, prefill={"chunk_tokens": 16}, transport=transport, general_nodes=2,
            handoff={"verify": True}, admission={"default_budget_s": 60, "queue_limit": 2000},
        )
    )  # fmt: skip
    rng = random.Random(4)
    gate = asyncio.Semaphore(48)
    outcomes = {"ok": 0, "left": 0, "refused": 0}

    async def one(number: int) -> None:
        prompt = f"marker {number:05d} " + "x" * rng.randrange(0, 90)
        limit = rng.randrange(1, 24)
        members = {"max_tokens": limit, "stream": rng.random() < 0.5}
        tpot = 5 if rng.random() < 0.2 else None
        async with gate:
            task = asyncio.create_task(running.complete(prompt, tpot_ms=tpot, **members))
            if rng.random() < 1 / 3:
                await asyncio.sleep(rng.random() ** 2 * 0.4)
                if task.cancel():
                    await asyncio.gather(task, return_exceptions=True)
                    if task.cancelled():
                        outcomes["left"] += 1
                        return
            reply = await task
        if reply.status != 200:
            assert reply.status in (429, 503), (reply.status, reply.body)
            outcomes["refused"] += 1
            return
        assert reply.error is None, reply.body
        assert reply.text == bytes(toy.generate(prompt.encode(), limit)).decode(), prompt
        outcomes["ok"] += 1

    await asyncio.gather(*(one(n) for n in range(count)))
    assert await running.leaks(20) == {}
    assert outcomes["ok"] >= count * 0.6, outcomes
    assert outcomes["left"] >= count * 0.15, outcomes
    for node in running.nodes.values():
        claimed = [t for _, name, t in node.events if name == "claimed"]
        released = [t for _, name, t in node.events if name == "released"]
        assert len(set(released)) == len(released), "released twice"
        assert set(claimed) <= set(released) | set(), "a claim was never released"
    load = {name: await running.load(name) for name in running.nodes}
    assert all(v["slots_free"] == (1 if n.startswith("fast") else 8) for n, v in load.items()), load


@pytest.mark.parametrize("fault", ["flip", "lose"])
async def test_a_damaged_byte_makes_the_digest_fire(hub, fault):
    config = {"slots": 2, "chunk_tokens": 16}
    faults = Faults(**{fault: 1.0})
    topology = toy_topology(fast=config, general=config, prefill=config, transport="damaged")
    topology["handoff"]["verify"] = True
    topology["router"]["retries"] = 0
    running = await hub.start(topology, plugins=[toy, Damaged(faults)])
    reply = await running.complete("every byte counts here", max_tokens=4)
    assert reply.status == 502, reply.body
    assert reply.error["code"] == "transfer_failed"
    assert await running.leaks() == {}


async def test_without_the_check_the_toy_itself_shows_the_damage(hub):
    config = {"slots": 2, "chunk_tokens": 16}
    topology = toy_topology(fast=config, general=config, prefill=config, transport="damaged")
    running = await hub.start(topology, plugins=[toy, Damaged(Faults(flip=1.0))])
    reply = await running.complete("every byte counts here", max_tokens=8)
    assert reply.status == 200
    assert reply.text != bytes(toy.generate(b"every byte counts here", 8)).decode()


class Damaged:
    """A plugin: the shm transport with faults."""

    def __init__(self, faults):
        self.faults = faults

    @hookimpl
    def pdhub_register_transports(self):
        def factory(config):
            transport = FaultyTransport(ShmTransport(config), self.faults, random.Random(3))
            transport.name = "damaged"
            return transport

        return [TransportSpec(name="damaged", summary="shm with faults", config=ShmConfig, factory=factory)]
