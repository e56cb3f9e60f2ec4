"""The router's own life: drain, observers, keys, two routers in one process, plugins that misbehave."""

import asyncio
import json
import signal
import sys

import pytest
from router_fakes import TEXT, Engine, answer_bytes, answer_json, answer_never, router_before, sse, text_event

from pdhub.api import EngineSpec, InvalidRequest, Policy, PolicySpec, hookimpl
from pdhub.policies.slo_threshold import SloThreshold, SloThresholdConfig
from pdhub.router.clients.openai import OpenAIClient, OpenAIConfig

pytestmark = pytest.mark.integration

DOCUMENT = {"choices": [{"text": "x", "finish_reason": "stop"}]}


async def test_drain_lets_open_answers_end_and_refuses_new_ones():
    release = asyncio.Event()

    async def answer(request):
        await release.wait()
        return await answer_json(DOCUMENT)(request)

    engine = Engine(answer)
    async with router_before({"relay": [engine]}) as running:
        first = asyncio.create_task(running.post(TEXT))
        while not engine.seen:
            await asyncio.sleep(0.01)
        drain = asyncio.create_task(running.router.drain(10))
        await asyncio.sleep(0.05)
        status, raw, headers = await running.post(TEXT)
        assert (status, headers["x-llm-d-request-dropped-reason"]) == (503, "rejected-shutting-down")
        async with running.http.get(running.url + "/ready") as reply:
            assert (reply.status, (await reply.json())["status"]) == (503, "draining")
        release.set()
        assert await drain
        assert (await first)[0] == 200
        assert json.loads(raw)["error"]["type"] == "server_error"


async def test_drain_is_bounded():
    engine = Engine(answer_never)
    async with router_before({"relay": [engine]}) as running:
        task = asyncio.create_task(running.post(TEXT))
        while not engine.seen:
            await asyncio.sleep(0.01)
        assert not await running.router.drain(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_two_routers_share_nothing():
    one, two = Engine(answer_json(DOCUMENT)), Engine(answer_json(DOCUMENT))
    async with router_before({"relay": [one]}) as first, router_before({"relay": [two]}) as second:
        await first.post(TEXT)
        assert await first.metric("pdhub_router_requests_total{") == 1
        assert await second.metric("pdhub_router_requests_total{") == 0


class Rude:
    """A plugin whose every part fails in its own way."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def pdhub_request_finished(self, record):
        self.seen.append(record)
        raise RuntimeError("observer")

    @hookimpl
    def pdhub_register_engines(self):
        class Client(OpenAIClient):
            def decode(self, leg):
                if leg.body["prompt"] == "bug":
                    raise KeyError("a bug with a secret")
                if leg.body["prompt"] == "refuse":
                    raise InvalidRequest("not this", param="prompt")
                return super().decode(leg)

        return [EngineSpec(name="rude", summary="Rude.", config=OpenAIConfig, client=Client)]

    @hookimpl
    def pdhub_register_policies(self):
        class Observing(SloThreshold, Policy):
            def observe(self, record):
                raise RuntimeError("policy")

        return [PolicySpec(name="rude", summary="Rude.", config=SloThresholdConfig, factory=Observing)]


async def test_plugins_that_fail_take_nothing_with_them():
    rude, engine = Rude(), Engine(answer_json(DOCUMENT))
    policy = {"type": "rude", "config": {"tpot_below_ms": 20, "fast": "relay", "otherwise": "relay"}}
    router = {"breaker_failures": 1}
    async with router_before(
        {"relay": [engine]}, plugins=[rude], engine="rude", policy=policy, router=router
    ) as running:
        assert (await running.post(TEXT))[0] == 200
        status, raw, _ = await running.post({**TEXT, "prompt": "bug"})
        assert status == 500
        assert b"secret" not in raw
        assert json.loads(raw)["error"]["code"] == "internal_error"
        assert (await running.post({**TEXT, "prompt": "refuse"}))[0] == 400
        assert (await running.post(TEXT))[0] == 200, "a bug of ours opens nobody's breaker"
        await running.idle()
        async with asyncio.timeout(5):
            while len(rude.seen) < 4:
                await asyncio.sleep(0.01)
        assert [r.outcome for r in rude.seen] == ["ok", "error", "client_error", "ok"]


async def test_each_endpoint_gets_its_own_key_on_every_path(monkeypatch):
    monkeypatch.setenv("KEY_OF_ONE", "sesame")
    engine = Engine(answer_json(DOCUMENT))
    keys = set()

    async def models(request):
        keys.add(request.headers.get("authorization"))
        return await Engine._models(engine, request)

    engine._models = models
    engine.app = type(engine.app)()
    engine.app.router.add_get("/v1/models", models)
    engine.app.router.add_post("/{path:.*}", engine._complete)
    async with router_before({"relay": [engine]}, node={"api_key_env": "KEY_OF_ONE"}) as running:
        await running.post(TEXT, authorization="Bearer clients-own")
        assert engine.seen[0][1]["authorization"] == "Bearer sesame"
        assert keys == {"Bearer sesame"}


async def test_the_process_drains_on_sigterm(tmp_path):
    engine = await Engine(answer_json(DOCUMENT)).start()
    config = tmp_path / "router.yaml"
    config.write_text(f"""
model: {{name: m}}
router: {{port: 0, debug_headers: true}}
pools:
- name: relay
  engine: {{type: openai}}
  nodes: [{{name: one, port: {engine.port}, launch: false}}]
policy: {{type: slo_threshold, config: {{tpot_below_ms: 20, fast: relay, otherwise: relay}}}}
""")
    code = (
        "import logging, sys; logging.basicConfig(level='INFO'); from pdhub.router.main import run; "
        "sys.exit(run(sys.argv[1]))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(config), stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            lines = []
            while "ready" not in "".join(lines[-1:]):
                line = (await process.stderr.readline()).decode()
                assert line, lines
                lines.append(line)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await engine.close()


async def test_the_openai_client_library_understands_every_end():
    import openai

    events = [text_event("a"), text_event("b")]
    engine = Engine(answer_json(DOCUMENT))
    async with (
        router_before({"relay": [engine]}, admission={"default_budget_s": 0.2}) as running,
        openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0) as client,
    ):

        async def ask(**members):
            return await client.completions.create(model="m", prompt="x", **members)

        assert (await ask()).choices[0].text == "x"
        assert [m.id async for m in client.models.list()] == ["m", "alias"]
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError):
            await ask(max_tokens=0)
        engine.answer = answer_bytes(sse(*events, text_event("", "stop")))
        assert [e.choices[0].text async for e in await ask(stream=True)] == ["a", "b", ""]
        engine.answer = answer_bytes(sse(*events, done=False), cut_off=True, pause=0.05)
        got = []

        async def read():
            async for event in await ask(stream=True):
                got.append(event.choices[0].text)

        with pytest.raises(openai.APIError, match="broke off"):
            await read()
        assert got == ["a", "b"]
        engine.answer = answer_json({"error": {"message": "busy"}}, status=429)
        with pytest.raises(openai.RateLimitError):
            await ask()
        engine.answer = answer_json({}, status=500)
        with pytest.raises(openai.InternalServerError):
            await ask()
