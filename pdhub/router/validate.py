"""Types and ranges of the members of an OpenAI body that the router or an engine reads.

Only known members are checked. Unknown ones travel untouched: the engine that gets them decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from pdhub.api.errors import InvalidRequest

Check = Callable[[Any], str | None]
"""What is wrong with a value, as the end of the sentence "<name> must be …"; None if nothing is."""

INT32 = (1 << 31) - 1
INT64 = (1 << 63) - 1


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def integer(low: int, high: int = INT32) -> Check:
    def check(value: Any) -> str | None:
        if not _is_int(value):
            return "an integer"
        return None if low <= value <= high else f"an integer from {low} to {high}"

    return check


def number(low: float, high: float, *, above: bool = False) -> Check:
    def check(value: Any) -> str | None:
        if not (_is_int(value) or isinstance(value, float)) or not math.isfinite(value):
            return "a number"
        if low <= value <= high and not (above and value == low):
            return None
        return f"a number {'above' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}"

    return check


def boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def text(value: Any) -> str | None:
    return None if isinstance(value, str) else "a string"


def mapping(value: Any) -> str | None:
    return None if isinstance(value, dict) else "an object"


def array(item: Check, *, least: int = 0) -> Check:
    def check(value: Any) -> str | None:
        if not isinstance(value, list):
            return "an array"
        if len(value) < least:
            return "an array that is not empty"
        for entry in value:
            if (wrong := item(entry)) is not None:
                return f"an array of which every entry is {wrong}"
        return None

    return check


_TOKENS = list[Annotated[int, msgspec.Meta(ge=0, le=INT32)]]


def tokens(*, least: int = 0) -> Check:
    """As an array of ``integer(0)``, without a step of Python for each entry: a prompt has thousands."""
    one_by_one = array(integer(0), least=least)

    def check(value: Any) -> str | None:
        try:
            if len(msgspec.convert(value, _TOKENS)) >= least:
                return None
        except msgspec.ValidationError:
            pass
        return one_by_one(value)  # it says what is wrong

    return check


def either(*checks: Check) -> Check:
    def check(value: Any) -> str | None:
        wrong = []
        for one in checks:
            if (said := one(value)) is None:
                return None
            wrong.append(said)
        return " or ".join(wrong)

    return check


def _filled(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "a string that is not empty"


def _bias(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "an object"
    limits = number(-100, 100)
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or limits(bias) is not None:
            return "an object of token ids and numbers from -100 to 100"
    return None


def _options(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "an object"
    for name in ("include_usage", "continuous_usage_stats"):
        if value.get(name) is not None and not isinstance(value[name], bool):
            return f"an object whose {name} is true or false"
    return None


def _message(value: Any) -> str | None:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return "an object with a role"
    content = value.get("content")
    if content is None or isinstance(content, str):
        return None
    if isinstance(content, list) and all(isinstance(p, (dict, str)) for p in content):
        return None
    return "an object whose content is a string or an array of parts"


COMMON: Mapping[str, Check] = {
    "model": _filled,
    "stream": boolean,
    "stream_options": _options,
    "max_tokens": integer(1),
    "max_completion_tokens": integer(1),
    "min_tokens": integer(0),
    "n": integer(1, 128),
    "best_of": integer(1, 128),
    "temperature": number(0, 100),
    "top_p": number(0, 1, above=True),
    "top_k": integer(-1),
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0, 100, above=True),
    "seed": integer(-INT64 - 1, INT64),
    "stop": either(_filled, array(_filled)),
    "stop_token_ids": tokens(),
    "logit_bias": _bias,
    "prompt_logprobs": integer(-1, 1000),
    "ignore_eos": boolean,
    "echo": boolean,
    "user": text,
    "include_stop_str_in_output": boolean,
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "return_token_ids": boolean,
    "return_tokens_as_token_ids": boolean,
    "response_format": mapping,
    "extra_args": mapping,
    "vllm_xargs": mapping,
}

CHAT: Mapping[str, Check] = {
    **COMMON,
    "messages": array(_message, least=1),
    "logprobs": boolean,
    "top_logprobs": integer(0, 1000),
    "tools": array(mapping),
    "tool_choice": either(text, mapping),
    "parallel_tool_calls": boolean,
    "chat_template_kwargs": mapping,
    "chat_template": text,
    "add_generation_prompt": boolean,
    "continue_final_message": boolean,
}

COMPLETIONS: Mapping[str, Check] = {
    **COMMON,
    "prompt": either(
        text,
        array(text, least=1),
        tokens(least=1),
        array(tokens(least=1), least=1),
    ),
    "logprobs": integer(0, 1000),
    "suffix": text,
}


def check_members(body: Mapping[str, Any], table: Mapping[str, Check]) -> None:
    """Raises InvalidRequest that names the first member that is wrong. null counts as absent."""
    for name, value in body.items():
        check = table.get(name)
        if check is None or value is None:
            continue
        if (wrong := check(value)) is not None:
            raise InvalidRequest(f"{name} must be {wrong}", param=name)


def check_together(body: Mapping[str, Any], chat: bool) -> None:
    """Members that are wrong only beside others."""
    if body.get("stream_options") is not None and not body.get("stream"):
        raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
    if chat and body.get("top_logprobs") and not body.get("logprobs"):
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if chat and (stray := _stray_choice(body)) is not None:
        # Prefill never sees a forced choice, so only decode would refuse it.
        raise InvalidRequest(f"tool_choice names '{stray[:200]}', which is none of the tools", param="tool_choice")
    least, most = body.get("min_tokens"), body.get("max_completion_tokens") or body.get("max_tokens")
    if least and most and least > most:
        raise InvalidRequest("min_tokens must not be larger than max_tokens", param="min_tokens")
    if (body.get("best_of") or body.get("n") or 1) < (body.get("n") or 1):
        raise InvalidRequest("best_of must not be smaller than n", param="best_of")


def _stray_choice(body: Mapping[str, Any]) -> str | None:
    """The function that is to be called, if it is none of those that are offered."""
    choice, tools = body.get("tool_choice"), body.get("tools")
    if not isinstance(choice, dict) or not tools:
        return None
    name = _function_name(choice)
    return name if name is not None and all(_function_name(tool) != name for tool in tools) else None


def _function_name(value: Mapping[str, Any]) -> str | None:
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


_INTERNAL = frozenset({"kv_transfer_params", "request_id", "data_parallel_rank", "bootstrap_host", "bootstrap_room"})
_CARRIERS = ("vllm_xargs", "extra_args", "extra_body", "nvext")


def refuse_internal(body: Mapping[str, Any]) -> None:
    """Members that steer the hand-over are the router's: a client's could reach another request's KV.

    They are refused, not stripped, at the top level and inside the members that carry engine extras.
    """
    for name in body:
        if name in _INTERNAL or name.startswith("pdhub"):
            raise InvalidRequest(f"{name} is internal and may not be sent", param=name)
    for carrier in _CARRIERS:
        inner = body.get(carrier)
        if isinstance(inner, dict):
            for name in inner:
                if name in _INTERNAL or name.startswith("pdhub"):
                    raise InvalidRequest(f"{carrier}.{name} is internal and may not be sent", param=carrier)
