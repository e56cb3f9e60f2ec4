"""What a relayed answer may change: a closed list. Everything else reaches the client as the engine's bytes.

===========================  =====================================================================================
the model's name             where the client's word for it is not the engine's
``kv_transfer_params``       removed unless null: they say where KV lies
``cached_tokens``            what prefill found in its cache; decode counts all that it was handed as cached
``created_cache_tokens``     beside it: what prefill put there
``prompt_logprobs``          from prefill, where decode was not asked for them
===========================  =====================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from pdhub.api.client import PrefillResult
from pdhub.api.errors import EngineFailed
from pdhub.router.sse import Renamer, split_events

_PARAMS = re.compile(rb'"kv_transfer_params"\s*:\s*(?!null)')
# Inside JSON strings quotes are escaped, so these only ever match real members.
_CACHED = re.compile(rb'("prompt_tokens_details"\s*:\s*\{[^{}]*?"cached_tokens"\s*:\s*)(?:\d+|null)')
_CREATED = re.compile(rb'("prompt_tokens_details"\s*:\s*\{[^{}]*?"created_cache_tokens"\s*:\s*)(?:\d+|null)')
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])

Known = Callable[[], Awaitable[PrefillResult | None]]
"""What the prefill leg told, once it has; None if there was none."""


async def nothing() -> None:
    """Known of an engine that prefills itself."""


class Edits:
    """Of one answer.

    Args:
        upstream, client: the model's name there and here.
        known: see :data:`Known`; asked only where it matters.
        prompt_logprobs: the client asked for them and decode was not.
    """

    def __init__(self, upstream: str, client: str, known: Known = nothing, *, prompt_logprobs: bool = False) -> None:
        self._rename = Renamer(upstream, client) if upstream != client else None
        self._known = known
        self._prompt_logprobs = prompt_logprobs

    async def events(self, data: bytes) -> bytes:
        """Whole events of a stream."""
        if _PARAMS.search(data):
            data = b"".join(_without_params(event) for event in split_events(data))
        return await self._common(data)

    async def document(self, raw: bytes, chat: bool) -> bytes:
        """A whole answer. ``chat``: of the chat endpoint. Raises what prefill failed with, if its answer is needed."""
        if _PARAMS.search(raw):
            raw = _dropped(raw)
        if self._prompt_logprobs and (result := await self._known()) is not None:
            raw = _with_prompt_logprobs(raw, result.body, chat)
        return await self._common(raw)

    async def _common(self, data: bytes) -> bytes:
        if _CACHED.search(data) and (result := await self._known()) is not None and result.cached_tokens is not None:
            data = _CACHED.sub(rb"\g<1>%d" % result.cached_tokens, data)
            data = _CREATED.sub(rb"\g<1>%s" % _created(result.body), data)
        return self._rename(data) if self._rename else data


def _created(prefill: Mapping[str, Any]) -> bytes:
    """Of prefill's answer, as JSON."""
    told = ((prefill.get("usage") or {}).get("prompt_tokens_details") or {}).get("created_cache_tokens")
    return b"%d" % told if isinstance(told, int) else b"null"


def _without_params(event: bytes) -> bytes:
    """One event without the member. Every engine sends an event's JSON on one line."""
    if not _PARAMS.search(event):
        return event
    lines = event.splitlines(keepends=True)
    for i, line in enumerate(lines):
        if line.startswith(b"data:") and _PARAMS.search(line):
            payload = line[5:].strip()
            lines[i] = line.replace(payload, _dropped(payload), 1)
    return b"".join(lines)


def _dropped(raw: bytes) -> bytes:
    members = _split(raw)
    members.pop("kv_transfer_params", None)
    return msgspec.json.encode(members)


def _with_prompt_logprobs(raw: bytes, prefill: Mapping[str, Any], chat: bool) -> bytes:
    """vLLM's place for them: the top level of a chat answer, the choice of a completion."""
    members = _split(raw)
    try:
        if chat:
            members["prompt_logprobs"] = prefill.get("prompt_logprobs")
        else:
            choices: list[dict[str, Any]] = [dict(choice) for choice in _choices.decode(members["choices"])]
            choices[0]["prompt_logprobs"] = prefill["choices"][0].get("prompt_logprobs")
            members["choices"] = choices
    except (KeyError, IndexError, msgspec.DecodeError) as error:
        raise EngineFailed("the engine's answer has no choice") from error
    return msgspec.json.encode(members)


def _split(raw: bytes) -> dict[str, Any]:
    try:
        return dict(_members.decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFailed("the engine's answer cannot be read") from error
