"""Tokens presented and parsed by the router, against what vLLM itself makes of the same tokens."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import pytest
import scripted
from api_answers import differences, normal
from api_cases import CHAT, COMPLETIONS, TOOLS, cases
from calls import at_once, get, post, send
from pdhub_worlds import NODES, PDHubWorld, Tree, with_nodes
from topology import Ports
from world import wait_for

TREE = Tree("api", ("whole",), {"type": "shm"}, chunk=512)
LOOSE = [{**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}} for tool in TOOLS]
PARSERS = {"reasoning": "deepseek_r1", "tools": "hermes"}

ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": LOOSE},
    "tools-none": {"tools": LOOSE, "tool_choice": "none"},
    "one-call": {"tools": LOOSE, "parallel_tool_calls": False},
    "hidden": {"tools": LOOSE, "include_reasoning": False, "logprobs": True, "return_token_ids": True},
    "logprobs": {"tools": LOOSE, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    "cut": {"tools": LOOSE, "max_tokens": 4},
    "specials": {"tools": LOOSE, "skip_special_tokens": False},
    "stop": {"tools": LOOSE, "stop": ["STOP", "Köln", "answer"]},
    "stop-order": {"stop": ["42", "is 42", " ends", "not here"]},
    "stop-kept": {"stop": ["STOP", "at all"], "include_stop_str_in_output": True},
    "stop-id": {"stop_token_ids": [70, 71, 268, 272]},
    "usage": {"tools": LOOSE, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
"""Members of a request, by what they are about."""

REFUSED = (
    "n", "n-2", "beam-search", "prompts", "prompts-ids", "echo*", "prompt-logprobs*", "structured-*", "json-*",
    "bad-words", "allowed-tokens", "tools-*", "seed*", "cache-salt", "truncated", "stop-kept", "stop-ids", "min-tokens",
)  # fmt: skip
"""Of api_cases: what asks for something that the transformers engine does not have; the router says so."""


@pytest.fixture(scope="module")
def tree(vllm, tmp_path_factory):
    """vLLM with parsers, alone and as prefill of a pool whose tokens the router presents; a model that says scripts."""
    directory = tmp_path_factory.mktemp("parsed")
    model = directory / "model"
    scripted.write(model)

    def change(document: dict[str, Any]) -> None:
        serve = document["pools"][0]["engine"]["config"]["serve"]
        serve["args"] += ["--reasoning-parser", PARSERS["reasoning"], "--enable-scale-out"]
        with_nodes(TREE)(document)
        document["model"]["parser"] = {"type": "vllm", "config": {**PARSERS, "via": "child"}}

    world = PDHubWorld(TREE.kind, TREE.pools, model, vllm, directory, change)
    try:
        world.start()
        yield world
    finally:
        world.close()


def test_chat_answers_are_those_of_vllm(tree, full):
    """Reasoning, calls, stops, log probabilities, usage: every script, asked for in every way, streamed and not."""
    work = [
        (letter, asked, stream)
        for letter, asked, stream in itertools.product(scripted.SCRIPTS, ASKED, (False, True))
        if _makes_sense(letter, asked) and (full or letter in "ACDH" or asked in ("plain", "logprobs"))
    ]
    wrong = [line for found in at_once(3, lambda w: _compared(tree, tree.router_url, *w), work) for line in found]
    assert not wrong, "\n".join(wrong[:40])


def test_the_scripts_are_said(tree):
    """Equal could also be equally empty."""
    status, text = post(f"{tree.router_url}{CHAT}", scripted.asking("C", tools=LOOSE), tree.via(NODES))
    assert status == 200, text
    (choice,) = json.loads(text)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"] == "the weather? "
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln", "days": 3}


def test_other_answers_are_those_of_vllm(tree):
    """Whatever the model says, which is mostly no valid UTF-8: text, stops, log probabilities and usage."""
    wrong = []
    for case in cases():
        if case.path not in (CHAT, COMPLETIONS) or "bad" in case.name or "loose" in case.name or _refused(case.name):
            continue
        for stream in (False, True) if case.streams else (False,):
            body = {k: v for k, v in case.body.items() if k != "stream_options" or stream}
            wrong += _differences(tree, tree.router_url, case.path, {**body, "stream": stream}, case.name)
    assert not wrong, "\n".join(wrong[:40])


def test_what_the_engine_cannot_do_goes_elsewhere_or_is_refused(tree):
    forced = scripted.asking("C", tools=LOOSE, tool_choice="required")
    strict = scripted.asking("C", tools=TOOLS)
    for body in (forced, strict):
        status, text = post(f"{tree.router_url}{CHAT}", body, tree.via(NODES))
        assert status == 400, text
        assert json.loads(text)["error"]["code"] == "unsupported"
        assert post(f"{tree.router_url}{CHAT}", body, tree.via("whole"))[0] == 200


def test_the_prefill_instance_can_parse_instead(tree, full):
    letters = list(scripted.SCRIPTS) if full else ["C", "F"]
    with _router(tree, "derender") as url:
        work = [
            (letter, asked, stream)
            for letter, asked, stream in itertools.product(letters, ("plain", "tools", "logprobs"), (False, True))
            if _makes_sense(letter, asked)
        ]
        found = at_once(2, lambda w: _compared(tree, url, *w, usage=False), work)
        status, text = post(f"{url}{CHAT}", scripted.asking("H", stop=["STOP"]), tree.via(NODES))
    wrong = [line for lines in found for line in lines]
    assert not wrong, "\n".join(wrong[:40])
    assert (status, json.loads(text)["error"]["code"]) == (400, "unsupported"), text


def _makes_sense(letter: str, asked: str) -> bool:
    if asked == "one-call":
        return letter not in "GH"  # vLLM holds the model to one call by a grammar: it says other tokens
    return asked != "stop-id" or letter in "AB"


def _refused(name: str) -> bool:
    return any(fnmatchcase(name.partition("-")[2], pattern) for pattern in REFUSED)


def _compared(tree, url: str, letter: str, asked: str, stream: bool, *, usage: bool = True) -> list[str]:
    members = {k: v for k, v in ASKED[asked].items() if k != "stream_options" or stream}
    body = scripted.asking(letter, stream=stream, **members)
    told: list[str] = []
    for _ in range(5 if stream else 1):
        # What vLLM makes of two tokens that come at once is not always what it makes of one after the other: which
        # tokens come at once in its streams is chance, so it is asked again.
        told = _differences(tree, url, CHAT, body, f"{letter} {asked}", usage=usage)
        if not told:
            break
    return told


def _stopped(tree, url: str, body: dict[str, Any], name: str) -> list[str]:
    """With stop strings vLLM's streams hold back text, but not the tokens by which it knows where reasoning ends, and
    show marks. The answer that is not streamed says what is right."""
    whole = {name: value for name, value in body.items() if name != "stream_options"}
    status, text = post(tree.single.url + CHAT, {**whole, "stream": False})
    assert status == 200, text
    (choice,) = json.loads(text)["choices"]
    answer = send(url + CHAT, json.dumps(body).encode(), tree.via(NODES))
    streamed = normal(*answer, True)["choices"][0]
    delta, message = streamed["delta"], choice["message"]
    ended = ["stop" if choice["finish_reason"] == "stop" else streamed["finish_reason"][0]]
    content = message["content"] or ""
    if body.get("tools") and (begun := content.find("<tool_call>")) >= 0:
        # The string cut a call short: a document shows the text of it, a stream had told its beginning.
        content, ended = content[:begun], ["tool_calls"]
    pairs = {
        "content": (content, delta.get("content") or ""),
        "reasoning": (message.get("reasoning") or "", delta.get("reasoning") or ""),
        "stop": (choice["stop_reason"], streamed.get("stop_reason", [None])[0]),
        "finish": (ended, streamed["finish_reason"]),
    }
    return [f"{name} (stream): {what}: {one!r} | {other!r}" for what, (one, other) in pairs.items() if one != other]


def _differences(tree, url: str, path: str, body: dict[str, Any], name: str, *, usage: bool = True) -> list[str]:
    data = json.dumps(body).encode()
    if path == CHAT and body.get("stream") and body.get("stop"):
        return _stopped(tree, url, body, name)
    direct = send(tree.single.url + path, data)
    routed = send(url + path, data, tree.via(NODES))
    told = f"{name}{' (stream)' if body.get('stream') else ''}"
    if direct[0] != 200 or routed[0] != 200:
        return [f"{told}: {direct[0]} {direct[1][:300]} | {routed[0]} {routed[1][:300]}"]
    pair = [_spoken(normal(*answer, bool(body.get("stream")))) for answer in (direct, routed)]
    if not usage:
        pair = [_without(answer, "completion_tokens_details") for answer in pair]
    if body.get("return_tokens_as_token_ids"):
        # vLLM counts the characters of `token_id:N` there; in the text these offsets are nowhere
        pair = [_without(answer, "text_offset") for answer in pair]
    return [f"{told}: {line}" for line in differences(*pair)]


def _spoken(answer: dict[str, Any]) -> dict[str, Any]:
    """An empty text in a stream says as much as none."""
    for choice in answer["choices"].values() if "choices" in answer else ():
        if "delta" in choice:
            choice["delta"] = {name: value for name, value in choice["delta"].items() if value != ""}
    return answer


def _without(value: Any, member: str) -> Any:
    if isinstance(value, dict):
        return {k: _without(v, member) for k, v in value.items() if k != member}
    return [_without(item, member) for item in value] if isinstance(value, list) else value


def _nothing_missing(url: str) -> bool:
    status, text = get(f"{url}/ready")
    document = json.loads(text) if status == 200 else {}
    return bool(document) and not document["problems"] and set(document["pairs"].values()) <= {"good"}


@contextmanager
def _router(tree, via: str):
    """One more router in front of the same servers."""
    port = Ports().take()
    words = ["--set", f"model.parser.config.via={via}", "--set", f"router.port={port}"]
    with (tree.directory / f"router-{via}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdhub", "router", str(tree.path), *words], stdout=log, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _nothing_missing(url), 120, lambda: get(f"{url}/ready")[1])
        yield url
    finally:
        process.terminate()
        process.wait(60)
