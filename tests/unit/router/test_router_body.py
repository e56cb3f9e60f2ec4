"""The table of bad and good bodies, and that no JSON whatsoever is a crash."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import Feature, InvalidRequest, ModelNotFound
from pdhub.router.openai import CHAT_PATH, COMPLETIONS_PATH, parse_request
from pdhub.router.validate import CHAT, COMPLETIONS, array, integer, tokens

TEXT = {"model": "m", "prompt": "hello"}
TALK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def parse(path, body):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(path, raw, "m", ["alias"])


BAD = [
    ("stream", "yes"), ("stream", 1), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "3"),
    ("max_tokens", True), ("max_tokens", 1 << 40), ("max_completion_tokens", 0), ("n", 0), ("n", 1000), ("n", "1"),
    ("temperature", -0.1), ("temperature", "hot"), ("temperature", True), ("temperature", []), ("top_p", 0),
    ("top_p", 1.01), ("top_k", -2), ("top_k", 1.0), ("min_p", 1.1), ("presence_penalty", 3), ("frequency_penalty", -3),
    ("repetition_penalty", 0), ("seed", 1.5), ("seed", 1 << 63), ("stop", 5), ("stop", [1]), ("stop", ""),
    ("stop", ["a", ""]), ("stop_token_ids", [-1]), ("stop_token_ids", "1"), ("logit_bias", []),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": "x"}), ("logit_bias", {"1": 101}), ("logit_bias", {"١": 1}), ("ignore_eos", "x"),
    ("min_tokens", -1), ("prompt_logprobs", "x"), ("stream_options", True), ("user", 3), ("response_format", "json"),
]  # fmt: skip
BAD_TEXT = [
    ("prompt", 3), ("prompt", []), ("prompt", {}), ("prompt", [1, "a"]), ("prompt", [[]]), ("prompt", [True]),
    ("logprobs", -1), ("logprobs", True), ("model", 1), ("model", None), ("model", ""),
]  # fmt: skip
BAD_TALK = [
    ("messages", []), ("messages", {}), ("messages", "hi"), ("messages", [1]), ("messages", [{"content": "x"}]),
    ("messages", [{"role": 1, "content": "x"}]), ("messages", [{"role": "user", "content": 3}]), ("logprobs", 1),
    ("top_logprobs", -1), ("top_logprobs", True), ("tools", {}), ("tools", [1]), ("tool_choice", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "member", "value"),
    [(COMPLETIONS_PATH, TEXT, *case) for case in BAD + BAD_TEXT]
    + [(CHAT_PATH, TALK, *case) for case in BAD + BAD_TALK],
)
def test_a_wrong_member_is_named(path, body, member, value):
    with pytest.raises(InvalidRequest) as caught:
        parse(path, {**body, member: value})
    assert caught.value.param == member
    assert caught.value.message.startswith(member)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"3", b'"x"', b'{"model":"\xff"}', b'{"a":1e999}', b'{"a":NaN}', b"[" * 100_000,
     b'{"a":' * 50_000, b"\xef\xbb\xbf{}", b'{"model":"m"} x'],
)  # fmt: skip
def test_what_is_no_object_is_one_clear_error(raw):
    with pytest.raises(InvalidRequest) as caught:
        parse(COMPLETIONS_PATH, raw)
    assert not isinstance(caught.value, ModelNotFound)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS_PATH, {**TEXT, "stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS_PATH, {**TEXT, "stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        (CHAT_PATH, {**TALK, "top_logprobs": 3}, "top_logprobs"),
        (
            CHAT_PATH,
            {**TALK, "tools": [{"function": {"name": "f"}}, {}], "tool_choice": {"function": {"name": "g"}}},
            "tool_choice",
        ),
        (COMPLETIONS_PATH, {**TEXT, "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        (COMPLETIONS_PATH, {**TEXT, "n": 3, "best_of": 2}, "best_of"),
        (COMPLETIONS_PATH, {"model": "m"}, "prompt"),
        (CHAT_PATH, {"model": "m"}, "messages"),
        (CHAT_PATH, {"messages": TALK["messages"]}, "model"),
    ],
)
def test_members_that_do_not_fit_together(path, body, param):
    with pytest.raises(InvalidRequest) as caught:
        parse(path, body)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["kv_transfer_params", "request_id", "pdhub", "pdhub_anything", "bootstrap_room"])
def test_internal_members_are_refused_wherever_they_hide(name):
    for value in ({}, None, "x"):
        with pytest.raises(InvalidRequest) as caught:
            parse(COMPLETIONS_PATH, {**TEXT, name: value})
        assert caught.value.param == name
    for carrier in ("vllm_xargs", "extra_args", "nvext"):
        with pytest.raises(InvalidRequest) as caught:
            parse(CHAT_PATH, {**TALK, carrier: {name: 1}})
        assert caught.value.param == carrier


def test_both_names_of_the_limit():
    assert parse(CHAT_PATH, {**TALK, "max_tokens": 5}).max_tokens == 5
    assert parse(CHAT_PATH, {**TALK, "max_completion_tokens": 6}).max_tokens == 6
    assert parse(CHAT_PATH, {**TALK, "max_tokens": 5, "max_completion_tokens": 6}).max_tokens == 6
    assert parse(CHAT_PATH, {**TALK, "max_tokens": None}).max_tokens is None


def test_model_and_alias():
    request = parse(COMPLETIONS_PATH, {**TEXT, "model": "alias"})
    assert (request.model, request.served) == ("alias", "m")
    with pytest.raises(ModelNotFound) as caught:
        parse(COMPLETIONS_PATH, {**TEXT, "model": "gpt"})
    assert caught.value.code == "model_not_found"


def test_bytes_are_kept_and_unknown_members_pass():
    raw = b'{"model": "m",  "prompt":"x", "temperature":0.70, "brand_new": {"deep": [1, 2]}, "user": null}'
    request = parse(COMPLETIONS_PATH, raw)
    assert request.raw is raw
    assert request.body["brand_new"] == {"deep": [1, 2]}


@pytest.mark.parametrize(
    ("path", "members", "features"),
    [
        (COMPLETIONS_PATH, {}, set()),
        (COMPLETIONS_PATH, {"n": 2, "best_of": 3}, {Feature.N, Feature.BEST_OF}),
        (COMPLETIONS_PATH, {"prompt": ["a", "b"]}, {Feature.N}),
        (COMPLETIONS_PATH, {"prompt": ["a"]}, set()),
        (COMPLETIONS_PATH, {"echo": True, "logprobs": 0}, {Feature.ECHO, Feature.LOGPROBS}),
        (COMPLETIONS_PATH, {"prompt_logprobs": 0}, {Feature.PROMPT_LOGPROBS}),
        (COMPLETIONS_PATH, {"suffix": "x"}, {Feature.EXTENSIONS}),
        (COMPLETIONS_PATH, {"min_tokens": 2, "ignore_eos": True}, {Feature.MIN_TOKENS, Feature.IGNORE_EOS}),
        (COMPLETIONS_PATH, {"stop_token_ids": [4]}, {Feature.STOP_TOKEN_IDS}),
        (CHAT_PATH, {"logprobs": True}, {Feature.LOGPROBS}),
        (CHAT_PATH, {"logprobs": False}, set()),
        (CHAT_PATH, {"tools": [{"type": "function"}]}, {Feature.TOOLS}),
        (CHAT_PATH, {"tools": [{"type": "function"}], "tool_choice": "none"}, set()),
        (CHAT_PATH, {"tools": []}, set()),
        (CHAT_PATH, {"response_format": {"type": "json_object"}}, {Feature.GRAMMAR}),
        (CHAT_PATH, {"response_format": {"type": "text"}}, set()),
        (CHAT_PATH, {"guided_regex": "a+"}, {Feature.GRAMMAR}),
        (CHAT_PATH, {"bad_words": ["x"]}, {Feature.EXTENSIONS}),
        (CHAT_PATH, {"reasoning_effort": "low"}, {Feature.REASONING}),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            {Feature.MULTIMODAL},
        ),
        (CHAT_PATH, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, set()),
    ],
)
def test_features(path, members, features):
    body = {**(TALK if path == CHAT_PATH else TEXT), **members}
    assert parse(path, body).features == features


def test_prompt_size_estimates():
    assert parse(COMPLETIONS_PATH, {**TEXT, "prompt": [1, 2, 3]}).prompt_low == 3
    assert parse(COMPLETIONS_PATH, {**TEXT, "prompt": [[1, 2, 3]]}).prompt_high == 3
    request = parse(COMPLETIONS_PATH, {**TEXT, "prompt": "word " * 1000})
    assert request.prompt_low <= 1000 <= request.prompt_high


names = st.sampled_from(sorted({*CHAT, *COMPLETIONS, "kv_transfer_params", "x", "functions", "audio"}))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | names, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from([CHAT_PATH, COMPLETIONS_PATH]), st.dictionaries(names, values, max_size=8), st.booleans())
def test_any_object_is_a_request_or_an_invalid_one(path, body, valid_core):
    if valid_core:
        body = {**body, **(TALK if path == CHAT_PATH else TEXT)}
    try:
        request = parse(path, body)
    except InvalidRequest:
        return
    assert request.served == "m"
    assert request.max_tokens is None or request.max_tokens > 0


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([CHAT_PATH, COMPLETIONS_PATH]), st.binary(max_size=60))
def test_any_bytes_are_an_invalid_request(path, raw):
    with pytest.raises(InvalidRequest):
        parse(path, raw)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(-2, 3), st.just(1 << 31), st.just(1 << 70), st.booleans(), st.floats(), st.none()))
)
def test_token_ids_are_checked_at_once_as_they_would_be_one_by_one(ids):
    for least in (0, 1):
        assert tokens(least=least)(ids) == array(integer(0), least=least)(ids)


@pytest.mark.parametrize("value", [None, "12", {"1": 2}, 3, [[1]], ["1"]])
def test_what_is_no_array_of_token_ids(value):
    assert tokens()(value) == array(integer(0))(value) is not None


def test_a_long_prompt_with_one_wrong_id():
    with pytest.raises(InvalidRequest, match="prompt must be a string or an array of which every entry is a string or"):
        parse(COMPLETIONS_PATH, {"model": "m", "prompt": [*range(50_000), -1]})
