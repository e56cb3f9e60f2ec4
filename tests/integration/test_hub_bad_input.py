"""Every bad input gets a clear, OpenAI-shaped error with the right status, and nothing leaks."""

import asyncio

import pytest

from pdhub.testing import toy
from pdhub.testing.hub import toy_topology

pytestmark = pytest.mark.integration

CONFIG = {"slots": 2, "chunk_tokens": 16}
OK = {"model": "toy", "prompt": "hello", "max_tokens": 4}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

CASES = [
    ("not json", "/v1/completions", b"{nope", 400, None),
    ("not utf-8", "/v1/completions", b'{"model": "\xff"}', 400, None),
    ("no object", "/v1/completions", [1, 2], 400, None),
    ("empty", "/v1/completions", b"", 400, None),
    ("nothing in it", "/v1/completions", {}, 400, "model"),
    ("no prompt", "/v1/completions", {"model": "toy"}, 400, "prompt"),
    ("no messages", "/v1/chat/completions", {"model": "toy"}, 400, "messages"),
    ("messages is text", "/v1/chat/completions", {**CHAT, "messages": "hi"}, 400, "messages"),
    ("message without role", "/v1/chat/completions", {**CHAT, "messages": [{"content": "x"}]}, 400, "messages"),
    ("unknown model", "/v1/completions", {**OK, "model": "gpt-9"}, 404, "model"),
    ("model is a number", "/v1/completions", {**OK, "model": 3}, 400, "model"),
    ("max_tokens 0", "/v1/completions", {**OK, "max_tokens": 0}, 400, "max_tokens"),
    ("max_tokens negative", "/v1/completions", {**OK, "max_tokens": -5}, 400, "max_tokens"),
    ("max_tokens text", "/v1/completions", {**OK, "max_tokens": "4"}, 400, "max_tokens"),
    ("max_tokens bool", "/v1/completions", {**OK, "max_tokens": True}, 400, "max_tokens"),
    ("max_completion_tokens 0", "/v1/chat/completions", {**CHAT, "max_completion_tokens": 0}, 400, None),
    ("stream text", "/v1/completions", {**OK, "stream": "yes"}, 400, "stream"),
    ("temperature text", "/v1/completions", {**OK, "temperature": "hot"}, 400, "temperature"),
    ("temperature negative", "/v1/completions", {**OK, "temperature": -1}, 400, "temperature"),
    ("top_p too big", "/v1/completions", {**OK, "top_p": 1.5}, 400, "top_p"),
    ("stop is a number", "/v1/completions", {**OK, "stop": 3}, 400, "stop"),
    ("logit_bias list", "/v1/completions", {**OK, "logit_bias": [1]}, 400, "logit_bias"),
    ("n zero", "/v1/completions", {**OK, "n": 0}, 400, "n"),
    ("kv_transfer_params", "/v1/completions", {**OK, "kv_transfer_params": {}}, 400, "kv_transfer_params"),
    (
        "forged kv_transfer_params",
        "/v1/chat/completions",
        {**CHAT, "kv_transfer_params": {"pdhub": {"host": "10.0.0.1", "port": 1}}},
        400,
        "kv_transfer_params",
    ),
    ("prompt too long", "/v1/completions", {**OK, "prompt": "x" * 600}, 400, None),
    ("prompt plus max_tokens too long", "/v1/completions", {**OK, "prompt": "x" * 500, "max_tokens": 100}, 400, None),
    ("prompt of a wrong type", "/v1/completions", {**OK, "prompt": {"a": 1}}, 400, "prompt"),
    ("ids out of range", "/v1/completions", {**OK, "prompt": [1, 99999]}, 400, "prompt"),
    ("empty prompt", "/v1/completions", {**OK, "prompt": ""}, 400, "prompt"),
    ("deep nesting", "/v1/completions", b'{"model":"toy","prompt":"x","a":' + b"[" * 100_000, 400, None),
]


@pytest.fixture
async def running(hub):
    return await hub.start(
        toy_topology(fast=CONFIG, general=CONFIG, prefill=CONFIG, router={"body_limit_bytes": 200_000})
    )


async def test_each_bad_body_has_its_status_and_names_the_member(running):
    for name, path, body, status, param in CASES:
        reply = await running.post(path, body)
        assert reply.status == status, (name, reply.status, reply.body)
        error = reply.json["error"]
        assert set(error) >= {"message", "type", "param", "code"}, name
        assert error["message"], name
        assert error["type"] == "invalid_request_error", (name, error)
        if param:
            assert error["param"] == param, (name, error)
        assert "Traceback" not in error["message"]
    assert (await running.complete("still fine", max_tokens=2)).status == 200
    assert await running.leaks() == {}


async def test_unknown_model_and_long_prompt_have_the_known_codes(running):
    assert (await running.post("/v1/completions", {**OK, "model": "x"})).error["code"] == "model_not_found"
    reply = await running.post("/v1/completions", {**OK, "prompt": "x" * 600})
    assert reply.error["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in reply.error["message"]
    assert reply.error["param"] == "prompt"
    chat = {"model": OK["model"], "messages": [{"role": "user", "content": "x" * 600}]}
    reply = await running.post("/v1/chat/completions", chat)
    assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "messages")


async def test_a_body_over_the_limit_is_413(running):
    reply = await running.post("/v1/completions", {**OK, "prompt": "x" * 300_000})
    assert reply.status == 413
    assert reply.json["error"]["message"]


async def test_unknown_paths_and_methods_are_openai_shaped(running):
    async with running.http.get(running.url + "/v1/nothing") as reply:
        assert reply.status == 404
        assert (await reply.json())["error"]["message"]
    async with running.http.get(running.url + "/v1/completions") as reply:
        assert reply.status == 405
        assert (await reply.json())["error"]["message"]


async def test_a_layout_mismatch_costs_no_prefill(hub):
    other = {**CONFIG, "layers": 3}
    running = await hub.start(toy_topology(fast=CONFIG, general=CONFIG, prefill=other), wait=False)
    await asyncio.sleep(1.0)
    async with running.http.get(running.url + "/ready") as reply:
        assert reply.status == 503
        assert "layout" in (await reply.text())
    reply = await running.complete("hello", max_tokens=4)
    assert reply.status == 502, reply.body
    assert reply.error["code"] == "layout_mismatch"
    for node in running.nodes.values():
        assert not [name for _, name, _ in node.events if name in ("joined", "ready")]
    assert await running.leaks() == {}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "streaming"])
async def test_a_client_that_leaves_frees_everything(hub, phase, stream):
    slow = {**CONFIG, "token_ms": 20}
    prefill = {**CONFIG, "chunk_ms": 100}
    running = await hub.start(toy_topology(fast=slow, general=slow, prefill=prefill))
    body = {**OK, "prompt": "x" * 100, "max_tokens": 400, "stream": stream}
    task = asyncio.create_task(running.post("/v1/completions", body))
    wanted = "joined" if phase == "prefill" else "first_token"
    node = running.nodes["general-0"]
    async with asyncio.timeout(20):
        while not any(name == wanted for _, name, _ in node.events):
            await asyncio.sleep(0.01)
    task.cancel()
    assert await running.leaks(5) == {}
    reply = await running.complete("next", max_tokens=3)
    assert reply.text == bytes(toy.generate(b"next", 3)).decode()
