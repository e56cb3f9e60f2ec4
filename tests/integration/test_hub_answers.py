"""Whole requests through router, prefill and node over real sockets, with the toy engine: its answer depends on
every byte of the KV, so a right answer proves the hand-over."""

import asyncio
import json

import pytest

from pdhub.testing import toy
from pdhub.testing.hub import toy_topology

pytestmark = pytest.mark.integration

CONFIG = {"slots": 4, "chunk_tokens": 16}


def expected(prompt, max_tokens, **options):
    return bytes(toy.generate(prompt.encode(), max_tokens, toy.ToyConfig(**CONFIG), **options)).decode()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_answers_equal_the_reference_around_block_and_chunk_borders(hub, transport):
    running = await hub.start(
        toy_topology(fast=CONFIG, general=CONFIG, prefill=CONFIG, transport=transport, handoff={"verify": True})
    )
    text = "The quick brown fox jumps over the lazy dog; again and again it jumps."
    lengths = [1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 47, 48, 49, 60]
    for length in lengths:
        reply = await running.complete(text[:length], max_tokens=12, temperature=0)
        assert reply.status == 200, reply.body
        assert reply.text == expected(text[:length], 12)
        assert reply.json["usage"] == {
            "prompt_tokens": length,
            "completion_tokens": 12,
            "total_tokens": length + 12,
        } | {k: v for k, v in reply.json["usage"].items() if k.endswith("_details")}
    together = await asyncio.gather(*(running.complete(text[:n], max_tokens=12, temperature=0) for n in lengths[-8:]))
    assert [r.text for r in together] == [expected(text[:n], 12) for n in lengths[-8:]]
    assert await running.leaks() == {}


async def test_the_slo_chooses_the_pool_and_says_why(hub):
    running = await hub.start(toy_topology(fast=CONFIG, general=CONFIG, prefill=CONFIG))
    tight = await running.complete("hello", max_tokens=4, tpot_ms=5)
    loose = await running.complete("hello", max_tokens=4, tpot_ms=500)
    none = await running.complete("hello", max_tokens=4)
    assert [r.headers["x-pdhub-pool"] for r in (tight, loose, none)] == ["fast", "general", "general"]
    assert tight.headers["x-pdhub-reason"] == "tpot-below-threshold"
    assert tight.text == loose.text == none.text == expected("hello", 4)


async def test_chat_streams_events_in_order(hub):
    running = await hub.start(toy_topology(fast=CONFIG, general=CONFIG, prefill=CONFIG))
    body = {
        "model": "toy-alias",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reply = await running.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    assert reply.done
    assert reply.text == expected("user:hi\n", 7)
    assert reply.events[0]["choices"][0]["delta"]["role"] == "assistant"
    finishes = [c["finish_reason"] for e in reply.events for c in e["choices"] if c.get("finish_reason")]
    assert finishes == ["length"]
    assert reply.events[-1]["choices"] == []
    assert reply.events[-1]["usage"]["completion_tokens"] == 7
    assert sum("usage" in e and e["usage"] is not None for e in reply.events) == 1
    plain = await running.post("/v1/chat/completions", {**body, "stream": False, "stream_options": None})
    assert plain.json["choices"][0]["message"]["content"] == reply.text


async def test_a_stop_string_ends_the_engine_and_the_count(hub):
    slow = {**CONFIG, "token_ms": 5}
    running = await hub.start(toy_topology(fast=slow, general=slow, prefill=CONFIG))
    full = expected("stop me", 40)
    stop = full[10:13]
    cut = full.index(stop)
    for stream in (False, True):
        members = {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
        reply = await running.complete("stop me", max_tokens=400, stop=[stop], **members)
        assert reply.text == full[:cut]
        usage = reply.events[-1]["usage"] if stream else reply.json["usage"]
        assert usage["completion_tokens"] == cut + len(stop)
    assert await running.leaks() == {}


async def test_end_of_sequence_min_tokens_ignore_eos_and_the_rest_of_the_context(hub):
    options = {**CONFIG, "eos_every": 5, "max_context": 64}
    running = await hub.start(toy_topology(fast=options, general=options, prefill=options))
    config = toy.ToyConfig(**options)
    for prompt in ("alpha", "beta", "gamma", "delta", "epsilon"):
        ids = prompt.encode()
        for members in ({}, {"min_tokens": 9}, {"ignore_eos": True}):
            reply = await running.complete(prompt, **members)
            assert reply.status == 200, reply.body
            want = toy.generate(ids, 1000, config, **members)
            assert reply.text == bytes(t for t in want if t != toy.EOS).decode()
            assert reply.json["usage"]["completion_tokens"] == len(want)
            ended = "length" if len(want) + len(ids) >= 64 and want[-1] != toy.EOS else "stop"
            if members.get("ignore_eos"):
                ended = "length"
            assert reply.json["choices"][0]["finish_reason"] == ended


async def test_a_seed_repeats_and_logprobs_are_complete(hub):
    running = await hub.start(toy_topology(fast=CONFIG, general=CONFIG, prefill=CONFIG))
    members = {"max_tokens": 9, "temperature": 0.9, "seed": 11}
    first, second = [await running.complete("seeded", **members) for _ in range(2)]
    other = await running.complete("seeded", **{**members, "seed": 12})
    assert first.text == second.text != other.text
    unseeded = {(await running.complete("seeded", max_tokens=9, temperature=0.9)).text for _ in range(4)}
    assert len(unseeded) > 1
    for stream in (False, True):
        reply = await running.complete("probs", max_tokens=6, logprobs=2, stream=stream)
        documents = reply.events if stream else [reply.json]
        tokens = [t for d in documents for c in d["choices"] if c.get("logprobs") for t in c["logprobs"]["tokens"]]
        assert "".join(tokens) == reply.text == expected("probs", 6)


async def test_the_batch_one_node_receives_the_next_kv_while_it_decodes(hub):
    slow = {"slots": 1, "token_ms": 10, "chunk_tokens": 16}
    running = await hub.start(toy_topology(fast=slow, general=CONFIG, prefill=CONFIG))
    first = asyncio.create_task(running.complete("the first one", max_tokens=60, tpot_ms=5))
    node = running.nodes["fast-0"]
    while not any(name == "first_token" for _, name, _ in node.events):
        await asyncio.sleep(0.005)
    second = asyncio.create_task(running.complete("and the second", max_tokens=5, tpot_ms=5))
    replies = await asyncio.gather(first, second)
    config = toy.ToyConfig(**slow)
    assert replies[0].text == bytes(toy.generate(b"the first one", 60, config)).decode()
    assert replies[1].text == bytes(toy.generate(b"and the second", 5, config)).decode()
    times = {}
    for at, name, transfer in node.events:
        times.setdefault((transfer, name), at)
    one, two = list(dict.fromkeys(t for _, name, t in node.events if name == "claimed"))
    assert times[one, "first_token"] < times[two, "ready"] < times[one, "finished"], "no overlap"
    assert times[two, "slot"] >= times[one, "finished"], "two requests in one slot"
    assert await running.leaks() == {}


async def test_an_unserved_feature_is_one_clear_400(hub):
    running = await hub.start(toy_topology(fast=CONFIG, general=CONFIG, prefill=CONFIG))
    for members in ({"n": 2}, {"logit_bias": {"97": 5}}, {"echo": True}, {"response_format": {"type": "json_object"}}):
        reply = await running.complete("x", max_tokens=3, **members)
        assert reply.status == 400, (members, reply.body)
        assert reply.error["type"] == "invalid_request_error"
        assert next(iter(members)) in json.dumps(reply.error)
    assert await running.leaks() == {}
