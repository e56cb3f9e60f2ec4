"""``/v1/chat/completions``: a role, then content, then one finish reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdhub.api.parser import ParsedDelta, ParsedMessage, ToolCallDelta
from pdhub.router.presentation.logprobs import Entry
from pdhub.router.presentation.shape import Ending, Shape


class ChatShape(Shape):
    """Chat chunks and documents."""

    chunk = "chat.completion.chunk"
    whole = "chat.completion"

    def first(self, **members: Any) -> bytes:
        choice = {
            "index": 0,
            "delta": {"role": self._role, "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        self._add_prompt(members, choice)
        return self.event([choice], **members)

    def delta(self, text: str, entries: Sequence[Entry], ending: Ending | None = None, **members: Any) -> bytes:
        content = {"content": text} if text else {}
        return self.event([{"index": 0, "delta": content, **self._rest(entries, ending)}], **members)

    def parsed(
        self, delta: ParsedDelta, entries: Sequence[Entry], ending: Ending | None = None, **members: Any
    ) -> bytes:
        """As :meth:`delta`, of text that was parsed."""
        said: dict[str, Any] = {}
        if delta.reasoning:
            said["reasoning"] = delta.reasoning
        if delta.content:
            said["content"] = delta.content
        if delta.tool_calls:
            said["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        return self.event([{"index": 0, "delta": said, **self._rest(entries, ending)}], **members)

    def parsed_document(
        self, message: ParsedMessage, entries: Sequence[Entry], ending: Ending, usage: Mapping[str, Any]
    ) -> bytes:
        """As :meth:`document`, of an answer that was parsed."""
        said: dict[str, Any] = {"role": self._role, "content": message.content}
        if message.reasoning is not None:
            said["reasoning"] = message.reasoning
        if message.tool_calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        return self._whole({"message": said}, entries, ending, usage)

    def _around_text(self) -> tuple[bytes, bytes]:
        return b'{"index":0,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": self._role, "content": text}}

    def _render(self, entries: Sequence[Entry]) -> dict[str, Any]:
        assert self._logprobs is not None
        return self._logprobs.chat(entries)

    def _add_prompt(self, members: dict[str, Any], choice: dict[str, Any]) -> None:
        if self._prompt_token_ids is not None:
            members["prompt_token_ids"] = self._prompt_token_ids


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    out: dict[str, Any] = {"index": call.index}
    if call.id is not None:
        out |= {"id": call.id, "type": "function"}
    function: dict[str, Any] = {} if call.name is None else {"name": call.name}
    if call.arguments or call.name is None:
        function["arguments"] = call.arguments
    return {**out, "function": function}
