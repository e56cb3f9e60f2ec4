"""The two-leg rewrite: a row a member, and bodies with anything in them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import Base, Call, InvalidRequest
from pdhub.core.legs import leg_body, prefill_rewrite
from pdhub.core.members import PREFILL_CAP, PREFILL_DROP, PREFILL_KEEP, PREFILL_SET

CHAT = "/v1/chat/completions"
ABSENT = object()
_DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

# member, what the client sent, what the prefill leg sends
ROWS: list[tuple[str, Any, Any]] = [
    ("max_tokens", 512, 1),
    ("max_tokens", None, 1),
    ("max_tokens", ABSENT, 1),
    ("max_completion_tokens", 512, 1),
    ("max_completion_tokens", None, 1),
    ("max_completion_tokens", ABSENT, ABSENT),
    ("stream", True, False),
    ("stream", ABSENT, False),
    ("stream_options", {"include_usage": True}, ABSENT),
    ("min_tokens", 5, ABSENT),
    ("stop", ["\n"], ABSENT),
    ("stop", "x", ABSENT),
    ("stop_token_ids", [2], ABSENT),
    ("include_stop_str_in_output", True, ABSENT),
    ("n", 4, ABSENT),
    ("best_of", 4, ABSENT),
    ("use_beam_search", True, ABSENT),
    ("echo", True, ABSENT),
    ("tool_choice", "required", "auto"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, "auto"),
    ("tool_choice", "auto", "auto"),
    ("tool_choice", "none", "none"),
    ("tool_choice", None, None),
    ("tool_choice", ABSENT, ABSENT),
    ("function_call", {"name": "f"}, "auto"),
    ("function_call", "none", "none"),
    ("tools", TOOLS, TOOLS),
    ("messages", [{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
    ("prompt", [1, 2, 3], [1, 2, 3]),
    ("suffix", "end", "end"),
    ("chat_template_kwargs", {"enable_thinking": False}, {"enable_thinking": False}),
    ("temperature", 1e-7, 1e-7),
    ("top_p", 0.9, 0.9),
    ("seed", 2**63, 2**63),
    ("logit_bias", {"5": -100}, {"5": -100}),
    ("presence_penalty", 0.5, 0.5),
    ("frequency_penalty", 0.5, 0.5),
    ("bad_words", ["x"], ["x"]),
    ("response_format", {"type": "json_object"}, {"type": "json_object"}),
    ("structured_outputs", {"regex": "a+"}, {"regex": "a+"}),
    ("guided_json", {"type": "object"}, {"type": "object"}),
    ("guided_regex", "a+", "a+"),
    ("guided_choice", ["a"], ["a"]),
    ("guided_grammar", "root ::= 'a'", "root ::= 'a'"),
    ("logprobs", True, True),
    ("top_logprobs", 5, 5),
    ("prompt_logprobs", 2, 2),
    ("ignore_eos", True, True),
    ("parallel_tool_calls", False, False),
    ("user", "u", "u"),
    ("truncate_prompt_tokens", 5, 5),
    ("add_generation_prompt", False, False),
    ("continue_final_message", True, True),
    ("documents", [{"text": "d"}], [{"text": "d"}]),
    ("reasoning_effort", "low", "low"),
    ("cache_salt", "s", "s"),
    ("priority", -3, -3),
    ("service_tier", "flex", "flex"),
    ("some_extension", {"a": [1, None]}, {"a": [1, None]}),
]


@pytest.mark.parametrize(("member", "sent", "expected"), ROWS)
def test_what_happens_to_a_member_on_each_leg(member, sent, expected):
    body = {"model": "m", "functions": [{"name": "f"}], "tools": TOOLS}
    if sent is not ABSENT:
        body[member] = sent
    client = json.dumps(body).encode()
    before = json.dumps(body)
    prefill = json.loads(leg_body(Call("POST", CHAT, base=Base.PREFILL), client, body, CHAT))
    assert prefill.get(member, ABSENT) == expected
    assert prefill == prefill_rewrite(body, CHAT)
    assert json.dumps(body) == before, "the parsed body is not to be changed"
    assert leg_body(Call("POST", CHAT, base=Base.CLIENT), client, body, CHAT) is client


def test_every_member_of_the_tables_has_a_row():
    named = {member for member, _, _ in ROWS}
    assert {*PREFILL_SET, *PREFILL_CAP, *PREFILL_DROP, *PREFILL_KEEP} <= named
    assert not PREFILL_DROP.keys() & PREFILL_KEEP.keys()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_choice_without_tools_stays_for_the_engine_to_refuse(choice):
    assert prefill_rewrite({"tool_choice": choice}, CHAT)["tool_choice"] == choice


def test_an_engines_patch_comes_after_the_rewrite():
    client = b'{"model":"m","min_tokens":3,"extra":1}'
    call = Call("POST", CHAT, base=Base.PREFILL, set={"min_tokens": 1, "kv": {"a": 1}}, drop=frozenset({"extra"}))
    assert json.loads(leg_body(call, client, json.loads(client), CHAT)) == {
        "model": "m", "min_tokens": 1, "max_tokens": 1, "stream": False, "kv": {"a": 1},
    }  # fmt: skip


def test_a_body_of_its_own_starts_empty():
    call = Call("POST", "/claim", base=Base.EMPTY, set={"a": 1, "b": [2]})
    assert leg_body(call, b'{"model":"m"}', {"model": "m"}, CHAT) == b'{"a":1,"b":[2]}'
    assert leg_body(Call("GET", "/health"), b"{}", {}, CHAT) == b""


def test_dropped_and_set_is_set():
    call = Call("POST", CHAT, base=Base.CLIENT, set={"a": 2}, drop=frozenset({"a", "b"}))
    assert leg_body(call, b'{"a":1,"b":1,"c":1}', {}, CHAT) == b'{"a":2,"c":1}'


def test_untouched_members_keep_their_bytes():
    client = (
        b'{ "big": 123456789012345678901234567890, "tiny": 1e-7, "exp": 1E+2, "escaped": "\\u00e9\\ud83d\\ude00\\/",'
        b' "nested": {"b": 1.0, "a": [1e400, {"a": 1, "a": 2}]}, "gone": 1 }'
    )
    out = leg_body(Call("POST", CHAT, base=Base.CLIENT, drop=frozenset({"gone"})), client, {}, CHAT)
    assert out == (
        b'{"big":123456789012345678901234567890,"tiny":1e-7,"exp":1E+2,"escaped":"\\u00e9\\ud83d\\ude00\\/",'
        b'"nested":{"b": 1.0, "a": [1e400, {"a": 1, "a": 2}]}}'
    )


def test_of_duplicate_members_the_last_counts():
    out = leg_body(Call("POST", CHAT, base=Base.CLIENT, set={"z": 1}), b'{"a":1,"b":2,"a":3}', {}, CHAT)
    assert out == b'{"a":3,"b":2,"z":1}'


@pytest.mark.parametrize(
    "client", [b"", b"[]", b"{", b"null", b'{"a":1}}', b'{"a":nan}', b"\xff\xfe", b'{"a":"\\ud800"}', _DEEP]
)
def test_what_is_no_json_object_is_refused(client):
    with pytest.raises(InvalidRequest):
        leg_body(Call("POST", CHAT, base=Base.PREFILL), client, {}, CHAT)


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_CHANGED = {*PREFILL_SET, *PREFILL_CAP, *PREFILL_DROP, "tool_choice", "function_call"}
_names = st.text(max_size=8) | st.sampled_from(sorted(_CHANGED | PREFILL_KEEP.keys()))


@settings(deadline=None, max_examples=80)
@given(body=st.dictionaries(_names, _json, max_size=8), indent=st.sampled_from([None, 1]), ascii=st.booleans())
def test_unknown_members_reach_the_prefill_leg_in_order(body, indent, ascii):
    client = json.dumps(body, indent=indent, ensure_ascii=ascii).encode()
    prefill = json.loads(leg_body(Call("POST", CHAT, base=Base.PREFILL), client, body, CHAT))
    untouched = [name for name in body if name not in _CHANGED]
    assert [name for name in prefill if name not in _CHANGED] == untouched
    assert all(prefill[name] == body[name] and type(prefill[name]) is type(body[name]) for name in untouched)
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert not PREFILL_DROP.keys() & prefill.keys()


@settings(deadline=None, max_examples=80)
@given(
    body=st.dictionaries(_names, _json, max_size=8),
    changes=st.dictionaries(_names, _json, max_size=3),
    gone=st.frozensets(_names, max_size=3),
)
def test_a_patch_changes_what_it_names_and_nothing_else(body, changes, gone):
    client = json.dumps(body).encode()
    call = Call("POST", CHAT, base=Base.CLIENT, set=changes, drop=gone)
    expected = {name: value for name, value in body.items() if name not in gone or name in changes} | changes
    assert json.loads(leg_body(call, client, body, CHAT)) == expected
