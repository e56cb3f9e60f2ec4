from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pdhub.api import Capabilities, Feature, InvalidRequest, ModelNotFound, PrefillInfo, TokenLogprob
from pdhub.api.prefill import FirstToken
from pdhub.core.legs import prefill_rewrite
from pdhub.node.prefill_answer import document
from pdhub.node.prefill_request import LegRequest, parse
from pdhub.testing import toy

FULL = Capabilities(features=frozenset(Feature), max_context=64, max_logprobs=5)
INFO = PrefillInfo(toy.ToyConfig().layout(), FULL, 32, eos_token_ids=(256,))
BARE = replace(INFO, capabilities=Capabilities(max_context=64))
HANDOFF = {"transfer_id": "t", "generation": 1, "host": "h", "port": 9, "fingerprint": "f"}


def read(body: Any, *, chat: bool = False, info: PrefillInfo = INFO) -> LegRequest:
    base = {"model": "toy", "max_tokens": 1, **({"messages": [{"role": "user", "content": "x"}]} if chat else {})}
    if not chat:
        base["prompt"] = "x"
    raw = body if isinstance(body, bytes) else json.dumps({**base, **body}).encode()
    return parse(raw, chat=chat, models=["toy"], info=info)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "1"}, "max_tokens"),
        ({"max_completion_tokens": 7}, "max_completion_tokens"),
        ({"stop": ["a"]}, "stop"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "s"}, "suffix"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"never_heard_of": 1}, "never_heard_of"),
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": "x"}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"pdhub": HANDOFF, "do_remote_decode": True}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"pdhub": {**HANDOFF, "port": "x"}}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"pdhub": {**HANDOFF, "budget_s": 0}}}, "kv_transfer_params"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 6}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_chat_refusals(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body, chat=True)
    assert caught.value.param == param


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"1", b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read(raw)


def test_another_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound):
        read({"model": "other"})


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0.5},
        {"temperature": 0.5, "top_k": 4},
        {"seed": 3, "temperature": 1},
        {"presence_penalty": 1},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"5": 1}},
        {"logprobs": 1},
        {"kv_transfer_params": {"pdhub": {**HANDOFF, "min_tokens": 3}}},
    ],
)
def test_what_the_engine_does_not_declare_is_refused(body: dict[str, Any]) -> None:
    read(body)
    with pytest.raises(InvalidRequest):
        read(body, info=BARE)


def test_neutral_values_ask_nothing_of_an_engine() -> None:
    neutral = {
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0,
        "repetition_penalty": 1.0, "n": 1, "stream": False, "logit_bias": {}, "seed": None, "stop": None, "user": "u",
        "extra_args": {"ttft_target": 5}, "response_format": {"type": "text"},
    }  # fmt: skip
    assert read(neutral, info=BARE).sampling.temperature == 0
    assert read({}, info=BARE).sampling.temperature == 0


def test_defaults_of_the_model_apply_where_the_client_is_silent() -> None:
    info = replace(INFO, sampling_defaults={"temperature": 0.25, "top_k": 20})
    assert (read({}, info=info).sampling.temperature, read({}, info=info).sampling.top_k) == (0.25, 20)
    assert read({"temperature": 1}, info=info).sampling.temperature == 1
    assert read({"top_k": -1}, info=info).sampling.top_k == 0


def test_the_clients_end_conditions_mask_the_first_token() -> None:
    inner = {**HANDOFF, "min_tokens": 2, "stop_token_ids": [7]}
    assert read({"kv_transfer_params": {"pdhub": inner}}).first_mask((256,)) == (256, 7)
    assert read({"kv_transfer_params": {"pdhub": {**inner, "min_tokens": 1}}}).first_mask((256,)) == (256, 7)
    assert read({"kv_transfer_params": {"pdhub": {**inner, "min_tokens": 0}}}).first_mask((256,)) == ()


@pytest.mark.parametrize("prompt", ["x", [1, 2], ["x"], [[1, 2]]])
def test_one_prompt_in_every_form(prompt: Any) -> None:
    assert read({"prompt": prompt}).body["prompt"] in ("x", [1, 2])


def test_the_rewrite_of_a_rich_request_is_taken() -> None:
    client = {
        "model": "toy", "messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 90, "stream": True,
        "stream_options": {"include_usage": True}, "min_tokens": 5, "stop": ["z"], "stop_token_ids": [4], "n": 1,
        "tools": [{"type": "function"}], "tool_choice": "required", "logprobs": True, "top_logprobs": 2,
        "chat_template_kwargs": {"a": 1}, "ignore_eos": True, "user": "me", "parallel_tool_calls": False,
    }  # fmt: skip
    leg = prefill_rewrite(client, "/v1/chat/completions")
    leg |= {"kv_transfer_params": {"pdhub": HANDOFF}, "return_token_ids": True, "return_tokens_as_token_ids": True}
    request = parse(json.dumps(leg).encode(), chat=True, models=["toy"], info=INFO)
    assert request.logprobs == 2
    assert request.tokens_as_ids
    assert request.body["tools"] == [{"type": "function"}]


def text(ids: Any) -> str:
    return "".join(chr(i) for i in ids if i < 256)


FIRST = FirstToken(97, TokenLogprob(97, -0.5, ((97, -0.5), (98, -1.5))))


def test_a_chat_answer_has_vllms_shape_and_the_ids() -> None:
    request = read(
        {"logprobs": True, "top_logprobs": 2, "kv_transfer_params": {"pdhub": HANDOFF}, "return_token_ids": True},
        chat=True,
    )
    out = document(request, "r1", (5, 6), FIRST, text, {256})
    choice = out["choices"][0]
    assert out["id"] == "chatcmpl-r1"
    assert out["object"] == "chat.completion"
    assert choice["message"]["content"] == "a"
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"] == [97]
    assert out["prompt_token_ids"] == choice["prompt_token_ids"] == [5, 6]
    entry = choice["logprobs"]["content"][0]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("a", -0.5, [97])
    assert [t["token"] for t in entry["top_logprobs"]] == ["a", "b"]
    assert choice["pdhub_logprob"] == [97, -0.5, [[97, -0.5], [98, -1.5]]]
    assert out["usage"]["prompt_tokens"] == 2
    assert out["usage"]["total_tokens"] == 3


def test_a_completion_answer_has_vllms_shape() -> None:
    out = document(read({"logprobs": 2, "return_tokens_as_token_ids": True}), "r1", (5,), FIRST, text, {256})
    choice = out["choices"][0]
    assert out["id"] == "cmpl-r1"
    assert out["object"] == "text_completion"
    assert choice["text"] == "a"
    assert choice["logprobs"]["tokens"] == ["token_id:97"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:97": -0.5, "token_id:98": -1.5}]
    assert "pdhub_logprob" not in choice
    assert "token_ids" not in choice


@pytest.mark.parametrize(
    ("body", "token", "reason"),
    [({}, 256, "stop"), ({"ignore_eos": True}, 256, "length"), ({"stop_token_ids": [9]}, 9, "stop"), ({}, 9, "length")],
)
def test_the_finish_reason(body: dict[str, Any], token: int, reason: str) -> None:
    out = document(read(body), "r", (1,), FirstToken(token), text, {256})
    assert out["choices"][0]["finish_reason"] == reason
    assert out["choices"][0]["logprobs"] is None
