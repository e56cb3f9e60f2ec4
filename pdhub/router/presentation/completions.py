"""``/v1/completions``: text, then one finish reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdhub.router.presentation.logprobs import Entry
from pdhub.router.presentation.shape import Ending, Shape


class CompletionsShape(Shape):
    """Completions chunks and documents."""

    chunk = "text_completion"
    whole = "text_completion"

    def first(self, **members: Any) -> bytes | None:
        if self._prompt_token_ids is None:
            return None
        choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
        self._add_prompt(members, choice)
        return self.event([choice], **members)

    def delta(self, text: str, entries: Sequence[Entry], ending: Ending | None = None, **members: Any) -> bytes:
        return self.event([{"index": 0, "text": text, **self._rest(entries, ending)}], **members)

    def _around_text(self) -> tuple[bytes, bytes]:
        return b'{"index":0,"text":', b',"logprobs":null,"finish_reason":null}'

    def _message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _render(self, entries: Sequence[Entry]) -> dict[str, Any]:
        assert self._logprobs is not None
        return self._logprobs.completions(entries)

    def _add_prompt(self, members: dict[str, Any], choice: dict[str, Any]) -> None:
        if self._prompt_token_ids is not None:
            choice["prompt_token_ids"] = self._prompt_token_ids
