"""Requests of every kind that vLLM takes, or refuses: each is sent to vLLM directly and through pdhub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} of a city",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Rome", "Bonn"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]
COMPACT = {"12": -100, "13": -100, "16": -100, "35": -50}
"""A random model asked for JSON writes white space without end: not its tabs, ends of lines and blanks."""
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "[a-z]{3}"\}\}\n</tool_call>'


@dataclass(frozen=True)
class Case:
    """One request. ``name`` is what the table of differences calls it; ``streams``: sent with ``stream`` as well."""

    name: str
    path: str
    body: dict[str, Any]
    streams: bool = True
    raw: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


def _both() -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Members that chat and completions share."""
    greedy = {"temperature": 0, "max_tokens": 12}
    yield "greedy", greedy, True
    yield "max-tokens-1", {"temperature": 0, "max_tokens": 1}, True
    yield "ignore-eos", {**greedy, "ignore_eos": True, "min_tokens": 12}, True
    yield "seed", {"temperature": 1.3, "seed": 7, "max_tokens": 16}, True
    yield (
        "seed-top-k",
        {"temperature": 1.0, "seed": 11, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "max_tokens": 16},
        True,
    )
    yield "penalties", {**greedy, "presence_penalty": 1.0, "frequency_penalty": 1.5, "repetition_penalty": 1.2}, True
    yield "logit-bias", {**greedy, "logit_bias": {"68": 100}}, True
    yield "bad-words", {**greedy, "bad_words": ["a"]}, True
    yield "allowed-tokens", {**greedy, "allowed_token_ids": [68, 69, 70, 71]}, True
    yield "stop", {**greedy, "logit_bias": {"68": 50, "69": 50}, "stop": ["AB", "BA", "AA", "BB"]}, True
    yield (
        "stop-kept",
        {**greedy, "allowed_token_ids": [68, 69], "stop": ["A", "B"], "include_stop_str_in_output": True},
        True,
    )
    yield "stop-ids", {**greedy, "allowed_token_ids": [68, 69], "stop_token_ids": [68, 69]}, True
    yield "min-tokens", {**greedy, "allowed_token_ids": [68, 69], "stop_token_ids": [68, 69], "min_tokens": 5}, True
    yield "n", {**greedy, "n": 2, "temperature": 1.0, "seed": 3}, True
    yield "token-ids", {**greedy, "return_token_ids": True}, True
    yield "cache-salt", {**greedy, "cache_salt": "salt"}, True
    yield "unknown-member", {**greedy, "no_such_member": {"a": [1, 2.5, None]}}, True
    yield "priority-0", {**greedy, "priority": 0}, True
    yield "user", {**greedy, "user": "somebody"}, True
    yield "json-object", {**greedy, "max_tokens": 40, "response_format": {"type": "json_object"}}, True
    json_schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    yield "json-schema", {**greedy, "max_tokens": 60, "response_format": json_schema}, True
    for kind, value in {
        "regex": r"[ab]{3}-\d{4}",
        "choice": ["red", "green", "blue"],
        "json": SCHEMA,
        "grammar": 'root ::= "yes" | "no"',
    }.items():
        yield f"structured-{kind}", {**greedy, "max_tokens": 60, "structured_outputs": {kind: value}}, True
    yield "usage", {**greedy, "stream_options": {"include_usage": True}}, True
    yield "usage-each", {**greedy, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, True
    yield "beam-search", {"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 6}, False
    for name, loose in {
        "tokens": {"max_tokens": "4"},
        "temperature": {"temperature": "0"},
        "echo": {"echo": "no"},
    }.items():
        yield f"loose-{name}", {**greedy, **loose}, False
    for name, members in {
        "temperature-below-0": {"temperature": -1},
        "temperature-text": {"temperature": "hot"},
        "top-p-above-1": {"top_p": 1.5},
        "top-k-wrong": {"top_k": -5},
        "min-p-above-1": {"min_p": 2},
        "max-tokens-0": {"max_tokens": 0},
        "max-tokens-below-0": {"max_tokens": -1},
        "max-tokens-text": {"max_tokens": "many"},
        "max-tokens-beyond-context": {"max_tokens": 100_000},
        "min-above-max": {"min_tokens": 9, "max_tokens": 3},
        "n-0": {"n": 0},
        "stop-number": {"stop": 3},
        "penalty-above-2": {"presence_penalty": 3},
        "logit-bias-text": {"logit_bias": {"a": 1}},
        "logit-bias-beyond-vocabulary": {"logit_bias": {"99999": 1}},
        "stream-text": {"stream": "perhaps"},
        "schema-wrong": {"structured_outputs": {"json": "{"}},
        "regex-wrong": {"structured_outputs": {"regex": "["}},
        "structured-two": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "format-unknown": {"response_format": {"type": "yaml"}},
        "format-empty": {"response_format": {"type": "json_schema"}},
        "prompt-logprobs-too-many": {"prompt_logprobs": 1000},
        "seed-text": {"seed": "x"},
        "priority-without-policy": {"priority": 5},
        "stream-options-alone": {"stream_options": {"include_usage": True}},
        "model-unknown": {"model": "another"},
        "model-none": {"model": None},
        "kv-params": {"kv_transfer_params": {"do_remote_prefill": True}},
        "request-id": {"request_id": "mine"},
    }.items():
        yield f"bad-{name}", {"max_tokens": 4, "temperature": 0, **members}, False


def cases() -> Iterator[Case]:
    """All of them; names are unique."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me about rivers."}]
    for name, members, streams in _both():
        yield Case(f"chat-{name}", CHAT, {"model": "m", "messages": messages, **members}, streams)
        yield Case(f"text-{name}", COMPLETIONS, {"model": "m", "prompt": "Once upon a time", **members}, streams)
    yield from _chat(messages)
    yield from _completions()
    for path, name in ((CHAT, "chat"), (COMPLETIONS, "text")):
        yield Case(f"{name}-bad-json", path, {}, False, raw=b'{"model": "m", ')
        yield Case(f"{name}-bad-array", path, {}, False, raw=b"[1]")
        yield Case(f"{name}-bad-empty", path, {}, False, raw=b"")
    yield Case("path-unknown", "/v1/nothing", {"model": "m"}, False)


def _chat(messages: list[dict[str, Any]]) -> Iterator[Case]:
    def case(name: str, streams: bool = True, **members: Any) -> Case:
        return Case(f"chat-{name}", CHAT, {"model": "m", "messages": messages, "temperature": 0, **members}, streams)

    yield case("completion-tokens", max_completion_tokens=7)
    yield case("both-limits", max_completion_tokens=5, max_tokens=9)
    yield case("logprobs", max_tokens=6, logprobs=True, top_logprobs=3)
    yield case("logprobs-0", max_tokens=6, logprobs=True)
    yield case("prompt-logprobs", False, max_tokens=4, prompt_logprobs=2)
    yield case("parts", max_tokens=6, messages=[{"role": "user", "content": [{"type": "text", "text": "parts"}]}])
    yield case("echo", max_tokens=6, echo=True)
    yield case("no-generation-prompt", max_tokens=6, add_generation_prompt=False)
    yield case(
        "continue", max_tokens=6, add_generation_prompt=False, continue_final_message=True,
        messages=[*messages, {"role": "assistant", "content": "Rivers are"}],
    )  # fmt: skip
    yield case("template-arguments", max_tokens=6, chat_template_kwargs={"enable_thinking": False})
    yield case("tools-auto", max_tokens=12, tools=TOOLS, tool_choice="auto")
    yield case("tools-default", max_tokens=12, tools=TOOLS)
    yield case("tools-none", max_tokens=12, tools=TOOLS, tool_choice="none")
    yield case("tools-auto-called", max_tokens=90, tools=TOOLS, tool_choice="auto", structured_outputs={"regex": CALL})
    yield case("tools-required", logit_bias=COMPACT, max_tokens=90, tools=TOOLS, tool_choice="required")
    named = {"type": "function", "function": {"name": "weather"}}
    yield case("tools-named", logit_bias=COMPACT, max_tokens=90, tools=TOOLS, tool_choice=named)
    yield case("tools-cut", max_tokens=8, tools=TOOLS, tool_choice=named)
    yield case("bad-tool-name", False, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "none"}})
    yield case("bad-tool-choice", False, tools=TOOLS, tool_choice="perhaps")
    yield case("bad-choice-without-tools", False, max_tokens=4, tool_choice="required")
    yield case("bad-tools", False, tools=[{"type": "function"}])
    yield case("bad-top-logprobs-alone", False, max_tokens=4, top_logprobs=2)
    yield case("bad-top-logprobs-many", False, max_tokens=4, logprobs=True, top_logprobs=500)
    yield case("bad-messages-empty", False, messages=[])
    yield case("bad-messages-text", False, messages="hello")
    yield case("bad-messages-none", False, messages=None)
    yield case("bad-role", False, messages=[{"content": "hello"}])
    yield case("bad-part", False, messages=[{"role": "user", "content": [{"type": "smell"}]}])
    yield case("bad-image", False, messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}])  # fmt: skip
    yield case("bad-context", False, max_tokens=4, messages=[{"role": "user", "content": "long " * 2000}])
    yield case("bad-continue", False, continue_final_message=True, add_generation_prompt=True)
    yield case("bad-prompt-logprobs-stream", False, max_tokens=4, prompt_logprobs=1, stream=True)


def _completions() -> Iterator[Case]:
    def case(name: str, streams: bool = True, **members: Any) -> Case:
        body = {"model": "m", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, **members}
        return Case(f"text-{name}", COMPLETIONS, body, streams)

    yield case("ids", prompt=[60, 61, 62, 63, 64, 65], return_token_ids=True)
    yield case("ids-one", prompt=[60])
    yield case("prompts", prompt=["one", "two"])
    yield case("prompts-ids", prompt=[[60, 61], [62, 63, 64]])
    yield case("prompts-one", prompt=["just one"])
    yield case("prompts-one-ids", prompt=[[60, 61, 62]])
    yield case("logprobs", logprobs=3)
    yield case("logprobs-0", logprobs=0)
    yield case("logprobs-as-ids", logprobs=2, return_tokens_as_token_ids=True)
    yield case("prompt-logprobs", False, prompt_logprobs=2)
    yield case("prompt-logprobs-ids", False, prompt_logprobs=1, prompt=[60, 61, 62])
    yield case("echo", echo=True)
    yield case("echo-logprobs", echo=True, logprobs=1)
    yield case("echo-nothing", echo=True, max_tokens=1, logprobs=1)
    yield case("n-2", n=2, temperature=1.0, seed=5)
    yield case("default-max-tokens", max_tokens=None)
    yield case("truncated", prompt="many words " * 20, truncate_prompt_tokens=16)
    yield case("special-tokens", add_special_tokens=False)
    yield case("skip-special-off", skip_special_tokens=False)
    yield case("bad-best-of", False, best_of=1, n=2)
    yield case("bad-suffix", False, suffix="the end")
    yield case("bad-prompt-none", False, prompt=None)
    yield case("bad-prompt-empty", False, prompt="")
    yield case("bad-prompt-empty-list", False, prompt=[])
    yield case("bad-prompt-number", False, prompt=5)
    yield case("bad-prompt-mixed", False, prompt=["a", 1])
    yield case("bad-ids-beyond-vocabulary", False, prompt=[60, 99_999])
    yield case("bad-ids-below-0", False, prompt=[-1, 60])
    yield case("bad-logprobs-many", False, logprobs=500)
    yield case("bad-logprobs-below-0", False, logprobs=-2)
    yield case("bad-context", False, prompt=[60] * 5000)
    yield case("bad-context-exact", False, prompt=[60] * 4096, max_tokens=1)
    yield case("bad-prompt-logprobs-stream", False, prompt_logprobs=1, stream=True)
