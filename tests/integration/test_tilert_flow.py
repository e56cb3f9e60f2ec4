"""A stock TileRT pool behind a router, with scripted servers: who is asked, who is spared, what clients see."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from router_fakes import Engine, Running, Server, answer_json

from pdhub import registry
from pdhub.config.build import build_plan
from pdhub.config.models import Config
from pdhub.router.server import RouterServer
from pdhub.testing import toy

pytest.importorskip("pdhub_tilert", reason="pdhub-tilert is not installed")
pytest.importorskip("pdhub_vllm", reason="pdhub-vllm is not installed")
pytestmark = pytest.mark.integration

NATIVE = {"id": "n", "object": "text_completion", "choices": [{"index": 0, "text": "native", "finish_reason": "stop"}]}


class Prefill(Server):
    """vLLM, as far as a prefill leg sees it."""

    def __init__(self):
        super().__init__()
        self.under_way = self.most = 0
        self.go = asyncio.Event()
        self.go.set()
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_post("/v1/completions", self._complete)

    async def _models(self, request):
        return web.json_response({"data": [{"id": "m", "max_model_len": 400}]})

    async def _metrics(self, request):
        return web.Response(text="")

    async def _complete(self, request):
        body = json.loads(await self.note(request))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.under_way -= 1
        ids = list(body["prompt"].encode())
        choice = {"index": 0, "text": "A", "token_ids": [65], "prompt_token_ids": ids, "finish_reason": "length"}
        usage = {"prompt_tokens": len(ids)}
        return web.json_response({"id": f"cmpl-{request.headers['x-request-id']}", "choices": [choice], "usage": usage})


class TileRT(Server):
    """A decode server. ``script(request, body)`` in place of its usual answer."""

    def __init__(self):
        super().__init__()
        self.busy, self.script, self.decodes, self.cancels = False, None, [], []
        self.app.router.add_get("/capabilities", self._capabilities)
        self.app.router.add_get("/decode_status", self._status)
        self.app.router.add_post("/pd/decode", self._decode)
        self.app.router.add_post("/pd/cancel", self._cancel)

    async def _capabilities(self, request):
        told = {"penalties": False, "ignore_eos": True, "logprobs": True}
        return web.json_response({"profile": "glm5", "engine": "fake", "capabilities": told})

    async def _status(self, request):
        return web.json_response({"status": "busy" if self.busy else "idle", "current_rid": None})

    async def _cancel(self, request):
        self.cancels.append(json.loads(await request.read())["rid"])
        return web.json_response({"error": "no matching in-flight request", "current_rid": None}, status=404)

    async def _decode(self, request):
        body = json.loads(await request.read())
        self.decodes.append(body)
        try:
            if self.script is not None:
                return await self.script(request, body)
        except asyncio.CancelledError:
            self.left += 1
            raise
        return lines({"t": [65]}, {"t": [66, 67]}, {"done": True, "n": 3, "finish_reason": "stop", "timing_ms": {}})


def lines(*documents):
    raw = b"".join(json.dumps(document).encode() + b"\n" for document in documents)
    return web.Response(body=raw, content_type="application/x-ndjson")


class World:
    def __init__(self, running, prefill, nodes, native):
        self.running, self.prefill, self.nodes, self.native = running, prefill, nodes, native

    async def ask(self, prompt="hello", headers=None, **members):
        body = {"model": "m", "prompt": prompt, "max_tokens": 8, **members}
        return await self.running.post(body, **(headers or {}))

    async def record(self):
        """Of the request that ended last; a moment after its answer it is there."""
        while not self.running.router.context.records:
            await asyncio.sleep(0.01)
        return await self.running.record()


@asynccontextmanager
async def world(tmp_path, *, nodes=1, native=True, options=None, **sections):
    prefill, fakes, other = Prefill(), [TileRT() for _ in range(nodes)], Engine(answer_json(NATIVE))
    for server in (prefill, *fakes, other):
        await server.start()
    pools = [
        {
            "name": "tilert",
            "engine": {"type": "tilert", "config": {"settle_s": 0.1, "max_seq_len": 300, **(options or {})}},
            "nodes": [{"name": f"t{i}", "port": n.port, "launch": False} for i, n in enumerate(fakes)],
        }
    ]
    if native:
        node = {"name": "native-0", "port": other.port, "launch": False}
        pools.append({"name": "native", "engine": {"type": "openai"}, "nodes": [node]})
    engine = {"type": "vllm", "config": {"handoff": "none"}}
    data = {
        "model": {"name": "m", "tokenizer": str(toy.write_tokenizer(tmp_path / "tokenizer"))},
        "router": {"port": 0, "debug_headers": True, "probe_interval_s": 0.1, "pair_check": False},
        "prefill": [{"name": "p0", "port": prefill.port, "launch": False, "engine": engine, "pools": ["tilert"]}],
        "pools": pools,
        "policy": {
            "type": "slo_threshold",
            "config": {"tpot_below_ms": 20, "fast": "tilert", "otherwise": pools[-1]["name"]},
        },
        **sections,
    }
    router = RouterServer(build_plan(Config.model_validate(data), registry.load(extra=[toy])))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        try:
            await router.start()
            running = Running(router, http)
            await until(lambda: _ready(running))
            yield World(running, prefill, fakes, other)
        finally:
            await router.close()
            for server in (prefill, *fakes, other):
                prefill.go.set()
                await server.close()


async def _ready(running):
    async with running.http.get(running.url + "/ready") as reply:
        return reply.status == 200 and not (await reply.json())["problems"]


async def until(look, within_s=30):
    end = time.monotonic() + within_s
    while not await look():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.01)


FAST = {"x-slo-tpot-ms": "5"}


async def test_a_tight_target_goes_to_tilert_and_the_rest_to_the_other_pool(tmp_path):
    async with world(tmp_path) as w:
        status, body, headers = await w.ask(headers=FAST)
        assert (status, headers["x-pdhub-pool"]) == (200, "tilert"), body
        assert json.loads(body)["choices"][0]["text"] == "ABC"
        _, body, headers = await w.ask()
        assert headers["x-pdhub-pool"] == "native"


@pytest.mark.parametrize(
    "members",
    [
        {"seed": 5}, {"min_tokens": 2}, {"stop_token_ids": [7]}, {"frequency_penalty": 0.5}, {"min_p": 0.1},
        {"logit_bias": {"5": 1}}, {"n": 2}, {"prompt_logprobs": 1}, {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1}, {"response_format": {"type": "json_object"}}, {"bad_words": ["x"]},
        {"logprobs": 6}, {"max_tokens": 400}, {"top_k": 300}, {"logprobs": 1, "temperature": 0.1},
        {"logprob_token_ids": [1]},
    ],
    ids=lambda members: "-".join(members),
)  # fmt: skip
async def test_what_tilert_refuses_is_served_elsewhere_before_any_prefill_is_spent(tmp_path, members):
    async with world(tmp_path) as w:
        status, body, headers = await w.ask(headers=FAST, **members)
        assert (status, headers["x-pdhub-pool"]) == (200, "native"), body
        assert (w.prefill.seen, w.nodes[0].decodes) == ([], [])


async def test_the_same_without_another_pool_is_one_clear_refusal(tmp_path):
    async with world(tmp_path, native=False) as w:
        for member, value in {"seed": 5, "top_k": 300, "min_tokens": 2}.items():
            status, body, _ = await w.ask(**{member: value})
            error = json.loads(body)["error"]
            assert (status, error["code"], error["param"]) == (400, "unsupported", member), body
        assert w.prefill.seen == []


async def test_a_refusal_of_the_node_itself_goes_on_too(tmp_path):
    async with world(tmp_path) as w:

        async def refuse(request, body):
            return web.json_response({"error": "not here", "error_type": "capability_unavailable"}, status=501)

        w.nodes[0].script = refuse
        status, body, headers = await w.ask(headers=FAST)
        assert (status, headers["x-pdhub-pool"]) == (200, "native"), body
        w.nodes[0].script = None
        _, _, headers = await w.ask(headers=FAST)
        assert headers["x-pdhub-pool"] == "tilert", "it is no fault of the node"


async def test_a_client_hears_a_wrong_value_in_openais_shape(tmp_path):
    async with world(tmp_path) as w:

        async def refuse(request, body):
            return web.json_response({"error": "top_p is odd", "error_type": "invalid_parameter"}, status=400)

        w.nodes[0].script = refuse
        status, body, _ = await w.ask(headers=FAST)
        assert (status, json.loads(body)["error"]["message"]) == (400, "top_p is odd")


async def test_one_hand_over_at_a_time_out_of_a_prefill_instance(tmp_path):
    async with world(tmp_path, nodes=3, native=False) as w:
        answers = await asyncio.gather(*(w.ask(f"prompt {n}") for n in range(12)))
        assert [status for status, _, _ in answers] == [200] * 12, answers
        assert w.prefill.most == 1
        assert len([n for n in w.nodes if n.decodes]) > 1
    async with world(tmp_path, nodes=3, native=False, options={"handovers": 0}) as w:
        w.prefill.go.clear()
        asking = [asyncio.create_task(w.ask(f"prompt {n}")) for n in range(3)]
        await until(lambda: _under_way(w, 3))
        w.prefill.go.set()
        assert [status for status, _, _ in await asyncio.gather(*asking)] == [200] * 3


async def _under_way(w, count):
    return w.prefill.under_way == count


async def test_a_node_that_is_busy_costs_no_prefill_and_the_wait_is_the_routers(tmp_path):
    async with world(tmp_path, native=False) as w:
        w.nodes[0].busy = True
        asking = asyncio.create_task(w.ask())
        await asyncio.sleep(0.3)
        assert (w.prefill.seen, asking.done()) == ([], False)
        w.nodes[0].busy = False
        status, _, _ = await asking
        assert status == 200
        assert (await w.record())["attempts"] == 1


async def test_a_node_taken_at_the_last_moment_is_no_fault(tmp_path):
    async with world(tmp_path, native=False) as w:
        left = [2]

        async def taken(request, body):
            if left[0]:
                left[0] -= 1
                return web.json_response({"error": "busy", "current_rid": "x"}, status=429)
            w.nodes[0].script = None
            return await w.nodes[0]._decode(request)

        w.nodes[0].script = taken
        status, body, _ = await w.ask()
        assert status == 200, body
        assert w.running.router.context.fleet.pools["tilert"].nodes["t0"].health(time.monotonic()).value == "ready"


async def test_cancelled_while_the_node_waits_it_is_told(tmp_path):
    async with world(tmp_path, native=False) as w:

        async def wait(request, body):
            await asyncio.sleep(3600)

        w.nodes[0].script = wait
        asking = asyncio.create_task(w.ask())
        await until(lambda: _decoding(w))
        asking.cancel()
        await until(lambda: _told(w))
        assert set(w.nodes[0].cancels) == {w.nodes[0].decodes[0]["rid"]}


async def _decoding(w):
    return bool(w.nodes[0].decodes)


async def _told(w):
    return bool(w.nodes[0].cancels)


async def test_a_node_that_goes_silent_is_left_alone_for_its_tombstone_time(tmp_path):
    async with world(tmp_path, options={"tombstone_s": 600.0}) as w:

        async def die(request, body):
            request.transport.abort()
            await asyncio.sleep(0)
            return web.Response()

        w.nodes[0].script = die
        status, _, headers = await w.ask(headers=FAST)
        assert (status, headers["x-pdhub-pool"]) == (200, "native")
        w.nodes[0].script = None
        node = w.running.router.context.fleet.pools["tilert"].nodes["t0"]
        assert node.health(time.monotonic() + 599).value == "open"
        assert node.health(time.monotonic() + 601).value == "half_open"
        _, _, headers = await w.ask(headers=FAST)
        assert headers["x-pdhub-pool"] == "native"


async def test_both_the_mean_and_the_tail_of_the_gaps_are_reported(tmp_path):
    async with world(tmp_path) as w:

        async def in_batches(request, body):
            reply = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
            await reply.prepare(request)
            await reply.write(b'{"t": [65]}\n')
            for _ in range(3):
                await asyncio.sleep(0.06)
                await reply.write(b'{"t": [66, 66, 66, 66, 66, 66, 66, 66, 66, 66]}\n')
            await reply.write(b'{"done": true, "n": 31, "finish_reason": "length", "timing_ms": {}}\n')
            await reply.write_eof()
            return reply

        w.nodes[0].script = in_batches
        status, _, _ = await w.ask(headers=FAST, max_tokens=31)
        assert status == 200
        record = await w.record()
        assert record["itl_p99_ms"] >= 50 > record["tpot_ms"]
        assert await w.running.metric("pdhub_router_itl_p99_seconds_count") == 1
