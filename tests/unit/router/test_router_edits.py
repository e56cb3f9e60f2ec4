"""The closed list of what a relayed answer changes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import EngineFailed, PrefillResult
from pdhub.router.edits import Edits
from pdhub.router.sse import split_events


def known(cached=None, **body):
    async def ask():
        return PrefillResult(body=body, cached_tokens=cached)

    return ask


def same(**more):
    return Edits("m", "m", **more)


def event(document, end=b"\n\n"):
    return b"data: " + json.dumps(document).encode() + end


NOTHING_TO_CHANGE = [
    b": ping\n\n",
    b'data: {"kv_transfer_params":null,"x":1}\n\n',
    b'data: {"text":"\\"kv_transfer_params\\": {\\"a\\":1}"}\n\n',
    b'data: {"text":"\\"prompt_tokens_details\\":{\\"cached_tokens\\":5}"}\n\n',
    b'data: {"usage":{"prompt_tokens_details":null}}\n\n',
    b'data: { "big" : 123456789012345678901234567890 , "f":1.50e+3 }\r\n\r\ndata: [DONE]\r\n\r\n',
]


@pytest.mark.parametrize("data", NOTHING_TO_CHANGE)
async def test_what_is_not_on_the_list_keeps_its_bytes(data):
    assert await same(known=known(cached=1)).events(data) == data


async def test_where_kv_lies_is_nobodys_business():
    params = {"remote_host": "10.0.0.1", "remote_block_ids": [[1, 2]], "n": {"kv": "}"}}
    events = [event({"a": 1.5}), b": c\r\n\r\n", event({"x": "kv", "kv_transfer_params": params, "y": 2}, b"\r\n\r\n")]
    out = await same().events(b"".join(events))
    assert out.startswith(events[0] + events[1])
    assert out.endswith(b"\r\n\r\n")
    assert json.loads(out[len(events[0] + events[1]) + 6 :]) == {"x": "kv", "y": 2}
    raw = json.dumps({"id": "i", "kv_transfer_params": params, "z": [1.0]}).encode()
    assert json.loads(await same().document(raw, chat=True)) == {"id": "i", "z": [1.0]}


async def test_cached_tokens_are_prefills_in_either_form():
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"audio": 1, "cached_tokens": 9}}
    out = await same(known=known(cached=4)).events(event({"choices": [], "usage": usage}))
    assert out == event({"choices": [], "usage": usage}).replace(b'"cached_tokens": 9', b'"cached_tokens": 4')
    for told, shown in ((256, 256), (None, None)):
        usage = {"prompt_tokens_details": {"created_cache_tokens": 0, "cached_tokens": 9}}
        prefill = {"usage": {"prompt_tokens_details": {"created_cache_tokens": told}}}
        out = await same(known=known(cached=4, **prefill)).events(event({"usage": usage}))
        wanted = {"created_cache_tokens": shown, "cached_tokens": 4}
        assert json.loads(out[6:])["usage"]["prompt_tokens_details"] == wanted
    raw = json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": None}}}).encode()
    assert json.loads(await same(known=known(cached=0)).document(raw, chat=False))["usage"] == {
        "prompt_tokens_details": {"cached_tokens": 0}
    }
    assert await same(known=known(cached=None)).document(raw, chat=False) == raw


async def test_prompt_logprobs_take_the_place_that_vllm_gives_them():
    told = [None, {"5": {"logprob": -0.25}}]
    raw = b'{"id":"i","choices":[{"text":"a","prompt_logprobs":null,"odd":1.50}],"big":12345678901234567890123}'
    edits = same(known=known(choices=[{"prompt_logprobs": told}]), prompt_logprobs=True)
    out = await edits.document(raw, chat=False)
    assert json.loads(out)["choices"][0] == {"text": "a", "prompt_logprobs": told, "odd": 1.5}
    assert b"1.50" in out
    assert b"12345678901234567890123" in out
    edits = same(known=known(prompt_logprobs=told), prompt_logprobs=True)
    assert (
        json.loads(await edits.document(b'{"choices":[{}],"prompt_logprobs":null}', chat=True))["prompt_logprobs"]
        == told
    )


@pytest.mark.parametrize("raw", [b'{"choices":[]}', b"{}", b'{"choices":[1]}'])
async def test_an_answer_without_a_choice_is_the_engines_failure(raw):
    edits = same(known=known(choices=[{"prompt_logprobs": []}]), prompt_logprobs=True)
    with pytest.raises(EngineFailed):
        await edits.document(raw, chat=False)


async def test_the_models_name_changes_with_the_rest():
    data = event({"model": "up", "usage": {"prompt_tokens_details": {"cached_tokens": 3}}})
    out = await Edits("up", "me", known(cached=2)).events(data)
    assert json.loads(out[6:]) == {"model": "me", "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}


@given(st.lists(st.sampled_from([b"data: a", b": c", b"x", b"\n\n", b"\r\n\r\n", b"\r\r", b"\n", b""]), max_size=12))
@settings(deadline=None, max_examples=60)
def test_splitting_loses_nothing(parts):
    data = b"".join(parts)
    assert b"".join(split_events(data)) == data
