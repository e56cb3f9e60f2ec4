"""The whole path: prefill instance, connector's side of the wire, real decode server, client, presentation."""

import asyncio
import json

import pytest
from tilert_planes import answer_of, first_of
from tilert_world import router

CHAT = "/v1/chat/completions"


def events_of(raw):
    return [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]


def text_of(tokens):
    return bytes(tokens).decode()


async def test_a_hundred_requests_are_answered_by_the_stub_engine(stub):
    async def one(n):
        prompt = f"prompt {n} " + "x" * (n % 60)
        status, raw, headers = await stub.ask(prompt=prompt, max_tokens=50, stream=n % 2 == 0)
        assert status == 200, raw
        assert headers["x-pdhub-node"] == "t0"
        wanted = text_of([first_of(list(prompt.encode())), 11, 22, 33])
        if n % 2:
            choice = json.loads(raw)["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (wanted, "stop")
            assert json.loads(raw)["usage"] == {
                "prompt_tokens": len(prompt), "completion_tokens": 4, "total_tokens": len(prompt) + 4,
            }  # fmt: skip
        else:
            assert "".join(e["choices"][0]["text"] for e in events_of(raw)) == wanted
            assert raw.endswith(b"data: [DONE]\n\n")

    before = await stub.seen()
    await asyncio.gather(*(one(n) for n in range(100)))
    after = await stub.seen()
    assert len(after["computed"]) - len(before["computed"]) == 100
    assert after["most"] == 1, "one hand-over at a time"
    assert set(after["told"].values()) == {"sent"}
    assert stub.breakers() == {"p0": "ready", "t0": "ready"}


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 200])
async def test_the_answer_is_made_of_the_prompts_own_kv(kv, length):
    prompt = [97 + (n * length) % 26 for n in range(length)]
    tokens, reason = answer_of(prompt, 20)
    status, raw, _ = await kv.ask(prompt=prompt, max_tokens=20)
    assert status == 200, raw
    choice = json.loads(raw)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text_of(tokens), reason)


async def test_what_prefill_and_the_record_say(kv):
    status, _, _ = await kv.ask(prompt="hello there", max_tokens=5, temperature=0.7)
    assert status == 200
    body = (await kv.seen())["computed"][-1]["body"]
    assert body["kv_transfer_params"] == {"tilert_host": "127.0.0.1", "tilert_ctrl_port": kv.nodes[0].ctrl}
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["return_token_ids"]) == (1, 0.7, 0.9, True)
    record = await kv.record()
    assert record.kv_bytes == 61 * (11 * 656 + 8448)
    assert record.handoff_ms is not None
    assert record.itl_p99_ms is not None
    assert record.itl_p99_ms >= record.tpot_ms * 0.9


async def test_the_first_token_may_end_the_answer(kv):
    for stream in (False, True):
        status, raw, _ = await kv.ask(prompt="!over", max_tokens=9, stream=stream)
        assert status == 200, raw
        if stream:
            choices = [e["choices"][0] for e in events_of(raw)]
            assert ["".join(c["text"] for c in choices), choices[-1]["finish_reason"]] == ["", "stop"]
        else:
            document = json.loads(raw)
            assert (document["choices"][0]["text"], document["choices"][0]["finish_reason"]) == ("", "stop")
            assert document["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("max_tokens", [1, 2, 4])
async def test_an_answer_that_is_cut_ends_by_length(stub, max_tokens):
    """The stub engine says ``stop`` all the same."""
    _, raw, _ = await stub.ask(prompt="cut", max_tokens=max_tokens)
    document = json.loads(raw)
    assert document["choices"][0]["finish_reason"] == "length"
    assert document["usage"]["completion_tokens"] == max_tokens


async def test_chat_with_log_probabilities(stub):
    messages = [{"role": "user", "content": "hi"}]
    status, raw, _ = await stub.ask(CHAT, messages=messages, max_tokens=9, logprobs=True, top_logprobs=2)
    assert status == 200, raw
    entries = json.loads(raw)["choices"][0]["logprobs"]["content"]
    assert entries[0]["logprob"] == -0.125, "the first is prefill's own"
    assert [entry["logprob"] for entry in entries[1:]] == [-0.5 - 0.25 * (t % 4) for t in (11, 22, 33)]
    assert [len(entry["top_logprobs"]) for entry in entries[1:]] == [2, 2, 2]


async def test_a_stop_string_ends_the_answer_and_the_node_is_told(kv):
    prompt = list(b"a long answer, please")
    tokens, _ = answer_of(prompt, 60)
    text = text_of(tokens)
    status, raw, _ = await kv.ask(prompt=prompt, max_tokens=60, stop=[text[3:5]], stream=True)
    assert status == 200, raw
    assert "".join(e["choices"][0]["text"] for e in events_of(raw)) == text[:3]
    await kv.idle()


async def test_the_token_may_come_by_log_probabilities_alone(machine, tmp_path):
    async with router(tmp_path, machine[1:2], machine[2], options={"first_token": "logprobs"}) as world:
        prompt = list(b"an old server")
        status, raw, _ = await world.ask(prompt=prompt, max_tokens=6)
        document = json.loads(raw)
        assert status == 200
        assert document["choices"][0]["text"] == text_of(answer_of(prompt, 6)[0])
        assert document["usage"]["prompt_tokens"] == len(prompt)
        assert "return_token_ids" not in (await world.seen())["computed"][-1]["body"]


async def test_a_pair_is_compared_with_the_prefill_instance_alone_before_it_is_used(machine, tmp_path):
    async with router(tmp_path, machine[1:2], machine[2], router={"pair_check": True}) as world:
        prompt = list(b"checked")
        status, raw, _ = await world.ask(prompt=prompt, max_tokens=6)
        assert status == 200, raw
        assert json.loads(raw)["choices"][0]["text"] == text_of(answer_of(prompt, 6)[0])
        assert world.server.context.fleet.pairs.found["p0", "t0"].held is False
