"""Who enters, waits, is sent to another pool, shed or refused, and how fast it is told."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import AsyncExitStack

import pytest
from router_fakes import TEXT, Engine, answer_json, router_before

from pdhub.api import hookimpl
from pdhub.api.plugin import PolicyPart, PolicySpec
from pdhub.api.policy import AdmissionOrder

pytestmark = pytest.mark.integration

DOCUMENT = {"choices": [{"text": "x", "finish_reason": "stop"}]}
AT_ONCE_S = 0.5
"""Generous: on a busy machine an answer takes its time. How fast refusals are is measured in bench/overload.py."""
FAST = {"x-slo-tpot-ms": "5"}


class Door:
    """An engine's answers: those before ``open`` is set wait for it, the others take ``takes_s``."""

    def __init__(self, takes_s=0.0):
        self.open = asyncio.Event()
        self.takes_s = takes_s
        self.engine = Engine(self._answer)

    @property
    def served(self):
        return [json.loads(body)["prompt"] for _, _, body in self.engine.seen]

    async def _answer(self, request):
        await asyncio.sleep(self.takes_s)
        await self.open.wait()
        return await answer_json(DOCUMENT)(request)

    async def occupied(self, count=1):
        async with asyncio.timeout(5):
            while len(self.engine.seen) < count:
                await asyncio.sleep(0.005)


def ask(running, prompt="x", priority=0, **headers):
    """A request; ``priority``: higher is more important (the body's is the other way round)."""
    return asyncio.create_task(_timed(running, {**TEXT, "prompt": prompt, "priority": -priority}, headers))


async def _timed(running, body, headers):
    start = time.monotonic()
    status, raw, told = await running.post(body, **{name.replace("_", "-"): value for name, value in headers.items()})
    code = json.loads(raw).get("error", {}).get("code")
    return status, code, told, time.monotonic() - start


async def waiting(running, count, pool="a"):
    async with asyncio.timeout(5):
        while running.router.context.gate.waiting()[pool] < count:
            await asyncio.sleep(0.005)


def two_pools(a, b, **sections):
    return router_before({"a": [a.engine], "b": [b.engine]}, options={"slots": 1}, **sections)


async def test_a_request_waits_at_the_next_pool_before_its_target_is_lost():
    a, b = Door(), Door()
    b.open.set()
    async with two_pools(a, b) as running:
        first = ask(running, "first", **FAST)
        await a.occupied()
        status, _, told, took = await ask(running, "second", x_slo_ttft_ms="600", **FAST)
        assert (status, told["x-pdhub-pool"], told["x-pdhub-reason"]) == (200, "b", "spill")
        assert took < 1.5
        assert await running.metric("pdhub_router_spilled_total{") == 1
        a.open.set()
        assert (await first)[0] == 200
        await running.idle()


async def test_it_does_so_at_once_when_the_wait_is_known():
    a, b = Door(takes_s=0.4), Door()
    a.open.set(), b.open.set()
    async with two_pools(a, b) as running:
        assert (await ask(running, "teaches", **FAST))[2]["x-pdhub-pool"] == "a"
        first = ask(running, "first", **FAST)
        await a.occupied(2)
        _, _, told, took = await ask(running, "second", x_slo_ttft_ms="200", **FAST)
        assert (told["x-pdhub-pool"], told["x-pdhub-reason"]) == ("b", "spill")
        assert took < 1.0
        _, _, told, _ = await ask(running, "patient", x_slo_ttft_ms="5000", **FAST)
        assert told["x-pdhub-pool"] == "a"
        await first


async def test_without_spill_it_waits_to_the_end_and_is_told_in_time():
    a, b = Door(), Door()
    async with two_pools(a, b, admission={"spill": False}) as running:
        first = ask(running, "first", **FAST)
        await a.occupied()
        status, code, told, took = await ask(running, "second", x_slo_ttft_ms="400", **FAST)
        assert (status, code) == (429, "queue_timeout")
        assert told["x-llm-d-request-dropped-reason"] == "rejected-ttl-expired"
        assert int(told["retry-after"]) >= 1
        assert took < 1.0, "never after its budget"
        assert not b.engine.seen
        a.open.set()
        await first


async def test_a_full_pool_sends_to_the_next():
    a, b = Door(), Door()
    b.open.set()
    async with two_pools(a, b, admission={"queue_limit": 0}) as running:
        first = ask(running, "first", **FAST)
        await a.occupied()
        assert (await ask(running, "second", **FAST))[2]["x-pdhub-pool"] == "b"
        a.open.set()
        await first


async def test_the_important_overtake_and_the_sheddable_make_room():
    a = Door()
    async with router_before({"a": [a.engine]}, options={"slots": 1}, admission={"queue_limit": 2}) as running:
        first = ask(running, "first")
        await a.occupied()
        low, plain = ask(running, "low", -1), ask(running, "plain")
        await waiting(running, 2)
        start = time.monotonic()
        high = ask(running, "high", 3)
        status, code, told, _ = await low
        assert time.monotonic() - start < AT_ONCE_S + 0.05
        assert (status, code, told["x-llm-d-request-dropped-reason"]) == (429, "shed", "rejected-saturated")
        status, code, told, took = await ask(running, "vip", 9)
        assert (status, code, told["x-llm-d-request-dropped-reason"]) == (429, "queue_full", "rejected-saturated")
        assert took < AT_ONCE_S + 0.05, "nobody is given up who is not sheddable"
        a.open.set()
        assert {(await task)[0] for task in (first, plain, high)} == {200}
        assert a.served == ["first", "high", "plain"]
        assert await running.metric('pdhub_router_refused_total{pool="a",reason="rejected-saturated"}') == 2


async def test_the_sheddable_are_refused_at_arrival_when_it_would_be_too_late():
    a = Door(takes_s=0.5)
    a.open.set()
    async with router_before({"a": [a.engine]}, options={"slots": 1}) as running:
        await ask(running, "teaches")
        first = ask(running, "first")
        await a.occupied(2)
        status, code, told, took = await ask(running, "low", -1, x_slo_ttft_ms="100")
        assert (status, code) == (429, "shed")
        assert int(told["retry-after"]) >= 1
        assert took < AT_ONCE_S + 0.05
        status, _, _, took = await ask(running, "plain", x_slo_ttft_ms="150")
        assert (status, took > 0.1, took < 1.0) == (429, True, True), "the others get their chance"
        await first


async def test_tenants_take_turns():
    a = Door()
    async with router_before({"a": [a.engine]}, options={"slots": 1}) as running:
        tasks = [ask(running, "first")]
        await a.occupied()
        for n, (prompt, tenant) in enumerate([("a0", "a"), ("a1", "a"), ("a2", "a"), ("b0", "b")]):
            tasks.append(ask(running, prompt, x_llm_d_inference_fairness_id=tenant))
            await waiting(running, n + 1)
        a.open.set()
        await asyncio.gather(*tasks)
        assert a.served == ["first", "a0", "b0", "a1", "a2"]


class Shortest:
    """A plugin: short prompts first; those of one letter may be refused."""

    @hookimpl
    def pdhub_register_policies(self):
        class Order(AdmissionOrder):
            def __init__(self, config):
                pass

            def rank(self, request, deadline, now):
                return (0.0, float(request.prompt_tokens))

        class Broken(Order):
            def rank(self, request, deadline, now):
                raise RuntimeError("order")

        made = {"shortest": Order, "broken": Broken}
        return [
            PolicySpec(name=name, summary="x", part=PolicyPart.ADMISSION, factory=factory)
            for name, factory in made.items()
        ]


@pytest.mark.parametrize(("order", "expected"), [("shortest", "short"), ("fifo", "long"), ("broken", "long")])
async def test_the_order_is_a_plugin(order, expected):
    a = Door()
    async with router_before(
        {"a": [a.engine]}, options={"slots": 1}, admission={"order": {"type": order}}, plugins=[Shortest()]
    ) as running:
        tasks = [ask(running, "first")]
        await a.occupied()
        tasks.append(ask(running, "long " * 50))
        await waiting(running, 1)
        tasks.append(ask(running, "short"))
        await waiting(running, 2)
        a.open.set()
        assert {(await task)[0] for task in tasks} == {200}
        assert a.served[1].split()[0] == expected


async def test_two_routers_share_a_busy_node_without_a_stampede():
    """The engine runs one request; each router believes that it may send four."""
    running_now, refused = 0, 0

    async def answer(request):
        nonlocal running_now, refused
        if running_now:
            refused += 1
            return await answer_json({"error": {"message": "busy"}}, status=429)(request)
        running_now += 1
        try:
            await asyncio.sleep(0.03)
        finally:
            running_now -= 1
        return await answer_json(DOCUMENT)(request)

    engine = await Engine(answer).start()
    async with AsyncExitStack() as stack:
        routers = [
            await stack.enter_async_context(router_before({"a": [engine]}, options={"slots": 4})) for _ in range(2)
        ]
        start = time.monotonic()
        results = await asyncio.gather(*(ask(routers[n % 2], f"{n}") for n in range(20)))
        took = time.monotonic() - start
        assert {status for status, *_ in results} == {200}
        assert refused < 40 + 60 * took, "each of ten waiting requests asking every 50 ms would be 200 a second"


async def test_two_routers_do_not_send_everything_to_one_node():
    async def answer(request):
        await asyncio.sleep(0.02)
        return await answer_json(DOCUMENT)(request)

    engines = [await Engine(answer).start() for _ in range(4)]
    async with AsyncExitStack() as stack:
        routers = [
            await stack.enter_async_context(router_before({"a": engines}, options={"slots": 4}, policy={"type": "slo"}))
            for _ in range(2)
        ]
        for _ in range(10):
            await asyncio.gather(*(ask(router, f"{n}") for n in range(4) for router in routers))
        counts = Counter({n: len(engine.seen) for n, engine in enumerate(engines)})
        assert sum(counts.values()) == 80
        assert max(counts.values()) < 40
