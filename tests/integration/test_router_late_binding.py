"""Engines that fetch the KV themselves: where a request decodes is chosen once more after prefill."""

import asyncio

import pytest
from router_fakes import TEXT, Engine, Prefill, answer_bytes, answer_json, router_before, sse, text_event

from pdhub.api import Base, Bind, Call, EngineSpec, LegOrder, Reply, hookimpl
from pdhub.router.clients.openai import OpenAIClient, OpenAIConfig


class PullClient(OpenAIClient):
    """As stock vLLM with a connector that pulls: prefill first, no claim."""

    order = LegOrder.PREFILL_FIRST
    bind = Bind.LATE

    def prefill(self, leg):
        return Call("POST", leg.request.endpoint, base=Base.PREFILL, reply=Reply.JSON)


class PushClient(PullClient):
    """One that pushes to the node that it was told."""

    bind = Bind.EARLY


class Plugin:
    @hookimpl
    def pdhub_register_engines(self):
        return [
            EngineSpec(name=name, summary=name, config=OpenAIConfig, client=client)
            for name, client in (("pull", PullClient), ("push", PushClient))
        ]


ANSWER = sse(text_event("a"), text_event("b", "length"))


def engine():
    return Engine(answer_bytes(ANSWER))


def before(engines, prefill, **more):
    return router_before({"pool": engines}, [prefill], engine=more.pop("engine", "pull"), plugins=[Plugin()], **more)


class Crowded:
    """While the prompt is computed, others come to the node that was chosen for it."""

    def __init__(self, node="pool-0", requests=5):
        self.router = None
        self.node, self.requests = node, requests

    async def __call__(self, request):
        fleet = self.router.context.fleet
        self.count(+self.requests)
        self.chosen = {n.name: n.in_flight for n in fleet.pools["pool"].nodes.values()}
        return await answer_json({"choices": [{"token_ids": [97]}], "prompt_token_ids": [1, 2]})(request)

    def count(self, change):
        context = self.router.context
        node = context.fleet.pools["pool"].nodes[self.node]
        node.count(change, context.clock())
        context.fleet.changed(node)


@pytest.mark.parametrize("stream", [True, False])
async def test_it_decodes_where_there_is_room_after_prefill(stream):
    crowd, engines = Crowded(), [engine(), engine()]
    if not stream:
        document = {"object": "text_completion", "choices": [{"index": 0, "text": "ab", "finish_reason": "length"}]}
        engines = [Engine(answer_json(document)), Engine(answer_json(document))]
    prefill = Prefill(script=crowd)
    async with before(engines, prefill) as running:
        crowd.router = running.router
        status, _, headers = await running.post({**TEXT, "stream": stream})
        assert status == 200
        assert crowd.chosen == {"pool-0": 6, "pool-1": 0}, "it counted where it was to go at first"
        assert headers["x-pdhub-node"] == "pool-1"
        assert [len(e.seen) for e in engines] == [0, 1]
        assert await running.metric("pdhub_router_rebound_total{") == 1
        record = await running.record()
        assert (record["node"], record["outcome"], record["attempts"]) == ("pool-1", "ok", 1)
        assert record["extra"]["moved_from"] == "pool-0"
        crowd.count(-5)
        await running.idle()
        assert all(not n.pending_tokens and not n.stays for n in running.router.context.fleet.endpoints())


async def test_it_stays_where_nothing_is_better():
    crowd, engines = Crowded(requests=0), [engine(), engine()]
    async with before(engines, Prefill(script=crowd)) as running:
        crowd.router = running.router
        _, _, headers = await running.post({**TEXT, "stream": True})
        assert headers["x-pdhub-node"] == "pool-0", "its own place does not count against it"
        assert await running.metric("pdhub_router_rebound_total{") == 0
        await running.idle()


async def test_an_engine_that_pushes_keeps_its_node():
    crowd, engines = Crowded(), [engine(), engine()]
    async with before(engines, Prefill(script=crowd), engine="push") as running:
        crowd.router = running.router
        _, _, headers = await running.post({**TEXT, "stream": True})
        assert headers["x-pdhub-node"] == "pool-0"
        crowd.count(-5)
        await running.idle()


async def test_a_failure_is_the_new_nodes():
    async def broken(request):
        return await answer_json({"error": {"message": "no", "type": "server_error"}}, status=500)(request)

    crowd, engines = Crowded(), [engine(), Engine(broken)]
    async with before(engines, Prefill(script=crowd)) as running:
        crowd.router = running.router
        crowd.count(0)
        status, _, headers = await running.post({**TEXT, "stream": True})
        assert status == 200
        assert headers["x-pdhub-node"] == "pool-0", "never again the one that failed"
        assert [len(e.seen) for e in engines] == [1, 1]
        assert await running.metric("pdhub_router_retries_total{") == 1
        crowd.count(-10)
        await running.idle()


async def test_a_node_that_went_away_in_the_meantime_is_left():
    engines = [engine(), engine()]

    async def drain(request):
        context = running.router.context
        node = context.fleet.pools["pool"].nodes["pool-0"]
        node.draining = True
        context.fleet.changed(node)
        return await answer_json({"choices": [{"token_ids": [97]}], "prompt_token_ids": [1, 2]})(request)

    async with before(engines, Prefill(script=drain), router={"probe_interval_s": 60}) as running:
        status, _, headers = await running.post({**TEXT, "stream": True})
        assert (status, headers["x-pdhub-node"]) == (200, "pool-1")
        await running.idle()


async def test_many_at_once_spread():
    arrived = asyncio.Event()
    waiting = 0

    async def together(request):
        nonlocal waiting
        waiting += 1
        if waiting == 8:
            arrived.set()
        await arrived.wait()
        return await answer_json({"choices": [{"token_ids": [97]}], "prompt_token_ids": [1, 2]})(request)

    engines = [engine(), engine()]
    async with before(engines, Prefill(script=together)) as running:
        await asyncio.gather(*(running.post({**TEXT, "stream": True}) for _ in range(8)))
        assert sorted(len(e.seen) for e in engines) == [4, 4]
        await running.idle()
