"""``/v1/chat/completions``: a role, then content, then one finish reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdhub.router.presentation.logprobs import Entry
from pdhub.router.presentation.shape import Ending, Shape


class ChatShape(Shape):
    """Chat chunks and documents."""

    chunk = "chat.completion.chunk"
    whole = "chat.completion"

    def first(self, **members: Any) -> bytes:
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        self._add_prompt(members, choice)
        return self.event([choice], **members)

    def delta(self, text: str, entries: Sequence[Entry], ending: Ending | None = None, **members: Any) -> bytes:
        content = {"content": text} if text else {}
        return self.event([{"index": 0, "delta": content, **self._rest(entries, ending)}], **members)

    def _around_text(self) -> tuple[bytes, bytes]:
        return b'{"index":0,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _render(self, entries: Sequence[Entry]) -> dict[str, Any]:
        assert self._logprobs is not None
        return self._logprobs.chat(entries)

    def _add_prompt(self, members: dict[str, Any], choice: dict[str, Any]) -> None:
        if self._prompt_token_ids is not None:
            members["prompt_token_ids"] = self._prompt_token_ids
