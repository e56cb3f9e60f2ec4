"""TileRT's engine hosted by ``pdhub node``: sender, pdhub's hand-over, TileRT's planes, its engine, router, answer."""

import asyncio
import contextlib
import importlib.util
import json

import pytest
from hosted_world import Hosted, router
from tilert_planes import answer_of, first_of

CHAT = "/v1/chat/completions"
PACE_S = 0.05


@pytest.fixture(scope="session")
def stub_node(tmp_path_factory):
    yield from _running(Hosted(tmp_path_factory.mktemp("hosted") / "stub", "stub"))


@pytest.fixture(scope="session")
def kv_node(tmp_path_factory):
    yield from _running(Hosted(tmp_path_factory.mktemp("hosted") / "kv", "kv", pace_s=PACE_S))


def _running(hosted):
    try:
        hosted.wait()
        yield hosted
    finally:
        hosted.stop()


@pytest.fixture
async def stub(stub_node):
    async with router(stub_node) as world:
        yield world
        await world.free()


@pytest.fixture
async def kv(kv_node):
    async with router(kv_node) as world:
        yield world
        await world.free()


def text_of(tokens):
    return bytes(tokens).decode()


async def right(world, prompt, max_tokens=8):
    """A request is answered from its own KV."""
    status, raw, _ = await world.ask(prompt=prompt, max_tokens=max_tokens)
    assert status == 200, raw
    tokens, reason = answer_of(list(prompt.encode()), max_tokens)
    choice = json.loads(raw)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text_of(tokens), reason)


async def leave(asking):
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


def long_answer(name):
    """A prompt whose answer does not end by itself within 100 tokens."""
    for n in range(1000):
        prompt = f"{name} {n}"
        if answer_of(list(prompt.encode()), 100)[1] == "length":
            return prompt
    raise AssertionError("none")


@pytest.mark.timeout(300)
async def test_thirty_requests_are_answered_by_tilerts_stub_engine(stub):
    async def one(n):
        prompt = f"prompt {n} " + "x" * (n * 4)
        status, raw, headers = await stub.ask(prompt=prompt, max_tokens=50, stream=n % 2 == 0)
        assert status == 200, raw
        assert headers["x-pdhub-node"] == "t0"
        wanted = text_of([first_of(list(prompt.encode())), 11, 22, 33])
        if n % 2:
            document = json.loads(raw)
            choice = document["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (wanted, "stop")
            assert (document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]) == (len(prompt), 4)
        else:
            events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
            assert "".join(e["choices"][0]["text"] for e in events) == wanted
            assert raw.endswith(b"data: [DONE]\n\n")

    await asyncio.gather(*(one(n) for n in range(30)))
    while len(stub.server.context.records) < 30:
        await asyncio.sleep(0.01)
    records = list(stub.server.context.records)
    assert {record.outcome for record in records} == {"ok"}
    assert {record.attempts for record in records} == {1}
    sizes = {record.prompt_tokens: record.kv_bytes for record in records}
    for tokens, nbytes in sizes.items():
        assert nbytes == 61 * -(-tokens // 64) * (64 * 656 + 8448)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 200])
async def test_the_answer_is_made_of_the_prompts_own_kv(kv, length):
    await right(kv, "".join(chr(97 + (n * length) % 26) for n in range(length)))


async def test_chat_with_log_probabilities(stub):
    messages = [{"role": "user", "content": "hi"}]
    status, raw, _ = await stub.ask(CHAT, messages=messages, max_tokens=9, logprobs=True, top_logprobs=2, temperature=0)
    assert status == 200, raw
    entries = json.loads(raw)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == [-0.125, *(-0.5 - 0.25 * (t % 4) for t in (11, 22, 33))]


async def test_the_first_token_may_end_the_answer(kv):
    status, raw, _ = await kv.ask(prompt="!over", max_tokens=9)
    document = json.loads(raw)
    assert (status, document["choices"][0]["text"], document["choices"][0]["finish_reason"]) == (200, "", "stop")
    assert document["usage"]["completion_tokens"] == 1


async def test_the_next_requests_kv_is_received_while_one_decodes(kv):
    prompt = long_answer("decodes")
    first = asyncio.create_task(kv.ask(prompt=prompt, max_tokens=100))
    await kv.until(lambda load: load["leases"].get("decoding") == 1, "one decodes")
    second = asyncio.create_task(right(kv, "the next one, whose KV comes meanwhile", 6))
    load = await kv.until(lambda load: load["leases"].get("ready") == 1, "the next one's KV is there")
    assert load["leases"].get("decoding") == 1, "and the first one still decodes"
    assert not first.done()
    status, raw, _ = await first
    assert (status, json.loads(raw)["choices"][0]["text"]) == (200, text_of(answer_of(list(prompt.encode()), 100)[0]))
    await second


async def test_cancel_while_prefill_computes(kv):
    asking = asyncio.create_task(kv.ask(prompt="~ three seconds", max_tokens=4))
    await kv.until(lambda load: load["leases"].get("writing") == 1, "the sender has joined")
    await leave(asking)
    await kv.free()
    await right(kv, "after a prefill that was left")


async def test_cancel_while_kv_is_written(kv):
    asking = asyncio.create_task(kv.ask(prompt="^" + "y" * 230, max_tokens=4))
    await kv.until(lambda load: load["leases"].get("writing") == 1, "the sender has joined")
    await asyncio.sleep(0.5)
    await leave(asking)
    await kv.free()
    await right(kv, "after KV of which a part came")


async def test_cancel_while_it_waits_for_the_slot(kv):
    first = asyncio.create_task(kv.ask(prompt=long_answer("holds"), max_tokens=100))
    await kv.until(lambda load: load["leases"].get("decoding") == 1, "one decodes")
    waiting = asyncio.create_task(kv.ask(prompt="waits", max_tokens=4))
    await kv.until(lambda load: load["leases"].get("ready") == 1, "one waits")
    await leave(waiting)
    await kv.until(lambda load: load["landings_free"] == 1, "its landing is free")
    assert (await first)[0] == 200
    await right(kv, "after one that never decoded")


async def test_cancel_while_it_decodes(kv):
    body = {"model": "m", "prompt": long_answer("to be left"), "max_tokens": 100, "stream": True}
    async with kv.http.post(kv.server.url + "/v1/completions", json=body) as reply:
        await reply.content.readany()
        assert (await kv.load())["leases"] == {"decoding": 1}
        reply.close()
    await kv.until(lambda load: load["leases"] == {}, "it stopped", within_s=4)
    await right(kv, "after an answer that was left")


@pytest.mark.parametrize(
    ("member", "value"), [("seed", 7), ("min_tokens", 3), ("logit_bias", {"5": 1}), ("n", 2), ("top_k", 300)]
)
async def test_what_tilert_cannot_do_is_refused_before_prefill(kv, member, value):
    status, raw, _ = await kv.ask(prompt="~ refused", max_tokens=4, **{member: value})
    assert status == 400, raw
    assert member in json.loads(raw)["error"]["message"]


@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("pdhub_nixl") is None, reason="needs pdhub-nixl")
async def test_over_nixl(tmp_path):
    hosted = Hosted(tmp_path / "nixl", "kv", transport="nixl")
    try:
        hosted.wait()
        async with router(hosted) as world:
            prompts = [f"over nixl {n} " + "z" * (n * 20) for n in range(10)]
            await asyncio.gather(*(right(world, prompt) for prompt in prompts))
            await world.free()
    finally:
        hosted.stop()
