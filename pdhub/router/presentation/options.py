"""The members of a request that shape its answer, read once and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdhub.api.errors import InvalidRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MAX_STOPS: Final = 64
MAX_STOP_CHARACTERS: Final = 16_384
"""Of all stop strings together. Every character of an answer is held against each, in the router's own thread."""


@dataclass(frozen=True, slots=True)
class Options:
    """How one answer is to look.

    Args:
        stop: stop strings; ``include_stop`` shows the one that matched.
        min_tokens: stop strings that end in the text of the first so many tokens do not count.
        logprobs: alternatives a token; None = no log probabilities.
        continuous_usage: a usage member in every chunk.
        token_ids: give token ids beside the text (``return_token_ids``).
        ids_for_text: name tokens ``token_id:N`` in log probabilities (``return_tokens_as_token_ids``).
        reasoning: show the reasoning that a parser splits off (``include_reasoning``).
        role: who says the answer of a chat: the assistant, unless no turn of theirs was begun.
    """

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    logprobs: int | None = None
    token_ids: bool = False
    ids_for_text: bool = False
    reasoning: bool = True
    role: str = "assistant"

    @classmethod
    def read(cls, endpoint: str, body: Mapping[str, Any]) -> Options:
        """From a parsed body; null means absent. Raises InvalidRequest that names the member."""
        stream = _flag(body, "stream")
        usage = body.get("stream_options")
        if usage is not None and not isinstance(usage, Mapping):
            raise _wrong("stream_options", "an object")
        if usage is not None and not stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        usage = usage or {}
        include_usage = _flag(usage, "include_usage")
        return cls(
            stream=stream,
            include_usage=include_usage,
            continuous_usage=include_usage and _flag(usage, "continuous_usage_stats"),
            stop=_stop(body.get("stop")),
            include_stop=_flag(body, "include_stop_str_in_output"),
            stop_token_ids=_ids(body.get("stop_token_ids")),
            ignore_eos=_flag(body, "ignore_eos"),
            min_tokens=_count(body, "min_tokens") or 0,
            skip_special_tokens=_flag(body, "skip_special_tokens", default=True),
            logprobs=_chat_logprobs(body) if endpoint == CHAT else _count(body, "logprobs"),
            token_ids=_flag(body, "return_token_ids"),
            ids_for_text=_flag(body, "return_tokens_as_token_ids"),
            reasoning=_flag(body, "include_reasoning", default=True),
            role=_role(body) if endpoint == CHAT else "assistant",
        )


def _role(body: Mapping[str, Any]) -> str:
    messages = body.get("messages")
    if _flag(body, "add_generation_prompt", default=True) or not messages:
        return "assistant"
    return str(messages[-1]["role"])


def _wrong(member: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{member} must be {wanted}", param=member)


def _flag(body: Mapping[str, Any], member: str, *, default: bool = False) -> bool:
    value = body.get(member)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(member, "true or false")
    return value


def _count(body: Mapping[str, Any], member: str) -> int | None:
    value = body.get(member)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(member, "an integer of at least 0")
    return value


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    top = _count(body, "top_logprobs")
    if _flag(body, "logprobs"):
        return top or 0
    if top:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None


def _stop(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _wrong("stop", "a string or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        raise _wrong("stop", f"at most {MAX_STOPS} strings of {MAX_STOP_CHARACTERS} characters together")
    return tuple(stops)


def _ids(value: Any) -> frozenset[int]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise _wrong("stop_token_ids", "a list of integers")
    return frozenset(ids)
