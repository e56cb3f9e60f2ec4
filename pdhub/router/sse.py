"""Watching a relayed stream of server-sent events without changing a byte of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdhub.api.errors import EngineFailed

MAX_EVENT = 16 << 20
"""Bytes. Something that never ends an event is no event stream."""

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n")
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content|arguments)"\s*:\s*"[^"]')
_json = msgspec.json.Decoder()


class StreamWatch:
    """Passes whole events on, as they are, and notes what matters in them.

    Only whole events leave: when the upstream breaks off inside one, an error event can follow on a fresh line
    instead of being glued to half an answer.

    Attributes:
        events: seen so far, comments not counted. texts: those that carry text, about one a token.
        done: the end mark was seen. finished: a finish reason was. usage: the last usage member.
        error: the upstream's own error; it and what follows it are not passed on.
    """

    def __init__(self) -> None:
        self.events = 0
        self.texts = 0
        self.done = False
        self.finished = False
        self.usage: Mapping[str, Any] | None = None
        self.error: Mapping[str, Any] | None = None
        self._buffer = bytearray()
        self._searched = 0  # no event ends before here

    def feed(self, data: bytes) -> bytes:
        """Whole events that ``data`` completed, unchanged. Raises EngineFailed for an endless event."""
        buffer = self._buffer
        buffer += data
        start = 0
        for match in _END.finditer(buffer, self._searched):
            if self.error is not None or self.done:
                break
            self._see(bytes(buffer[start : match.end()]))
            if self.error is not None:
                break
            start = match.end()
        out = bytes(buffer[:start])
        del buffer[:start]
        self._searched = max(0, len(buffer) - 3)
        if len(buffer) > MAX_EVENT:
            raise EngineFailed("the engine's event does not end")
        return out

    def rest(self) -> bytes:
        """At the end of the stream: a last event without its blank line, unless it is cut short."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        if self.done or self.error is not None or not rest.strip():
            return b"" if self.error is not None else rest
        self._see(rest)
        return rest if self.done or self.finished else b""

    def _see(self, event: bytes) -> None:
        lines = event.splitlines()
        payload = b"\n".join(line[5:].lstrip(b" ") for line in lines if line.startswith(b"data:"))
        if not payload:
            return
        self.events += 1
        if payload == b"[DONE]":
            self.done = True
            return
        if b'"error"' in payload and (error := error_in(payload)) is not None:
            self.error = error
            return
        if _FINISH.search(payload):
            self.finished = True
        if _TEXT.search(payload):
            self.texts += 1
        if _USAGE.search(payload):
            document = _object(payload)
            if isinstance(document.get("usage"), dict):
                self.usage = document["usage"]


def split_events(data: bytes) -> Iterator[bytes]:
    """Whole events, each with its blank line; what follows the last blank line is one more."""
    start = 0
    for match in _END.finditer(data):
        yield data[start : match.end()]
        start = match.end()
    if start < len(data):
        yield data[start:]


def error_in(payload: bytes) -> Mapping[str, Any] | None:
    """The top-level ``error`` of a JSON document, as an object; None if it has none."""
    error = _object(payload).get("error")
    if error is None or error is False:
        return None
    return error if isinstance(error, dict) else {"message": str(error)}


def _object(payload: bytes) -> dict[str, Any]:
    try:
        document = _json.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}
    return document if isinstance(document, dict) else {}


class Renamer:
    """Replaces the model's upstream name by the client's in whole events or documents.

    Inside JSON strings quotes are escaped, so the pattern only ever matches a real member.
    """

    def __init__(self, upstream: str, client: str) -> None:
        name = msgspec.json.encode(upstream)
        self._pattern = re.compile(rb'("model"\s*:\s*)' + re.escape(name))
        self._client = msgspec.json.encode(client)

    def __call__(self, data: bytes) -> bytes:
        return self._pattern.sub(lambda m: m.group(1) + self._client, data)
