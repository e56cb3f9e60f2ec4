"""Log probabilities in OpenAI's two formats.

One entry for each counted token, in order: also for the token that ended the answer and for those whose text a stop
string cut away, as vLLM gives them, so that there are always ``completion_tokens`` entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdhub.api.engine import TokenLogprob
from pdhub.router.presentation.text import TextDecoder

LEAST: Final = -9999.0
"""In place of minus infinity, which JSON cannot say; vLLM's number."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One token of an answer. ``offset``: where its text starts, in characters of the whole text."""

    token_id: int
    offset: int
    logprob: TokenLogprob | None = None


class LogprobFormat:
    """Renders entries.

    Args:
        text: for the tokens' text.
        top: alternatives a token.
        ids_for_text: name tokens ``token_id:N`` instead.
    """

    def __init__(self, text: TextDecoder, top: int, *, ids_for_text: bool = False) -> None:
        self._text = text
        self._top = top
        self._ids_for_text = ids_for_text

    def chat(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """The ``logprobs`` member of a chat choice."""
        return {"content": [self._chat_entry(entry.logprob) for entry in entries if entry.logprob]}

    def completions(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """The ``logprobs`` member of a completions choice. Its alternatives include the token itself."""
        given = [(entry.offset, entry.logprob) for entry in entries if entry.logprob]
        return {
            "text_offset": [offset for offset, _ in given],
            "token_logprobs": [_finite(logprob.logprob) for _, logprob in given],
            "tokens": [self._name(logprob.token_id) for _, logprob in given],
            "top_logprobs": [self._alternatives(logprob) for _, logprob in given],
        }

    def _chat_entry(self, logprob: TokenLogprob) -> dict[str, Any]:
        top = [self._pair(token_id, value) for token_id, value in logprob.top[: self._top]]
        return {**self._pair(logprob.token_id, logprob.logprob), "top_logprobs": top}

    def _pair(self, token_id: int, value: float) -> dict[str, Any]:
        return {
            "token": self._name(token_id),
            "logprob": _finite(value),
            "bytes": list(self._text.token_bytes(token_id)),
        }

    def _alternatives(self, logprob: TokenLogprob) -> dict[str, float]:
        pairs = [(logprob.token_id, logprob.logprob), *logprob.top[: self._top]]
        out: dict[str, float] = {}
        for token_id, value in pairs:
            out.setdefault(self._name(token_id), _finite(value))
        return out

    def _name(self, token_id: int) -> str:
        if self._ids_for_text:
            return f"token_id:{token_id}"
        return self._text.token_bytes(token_id).decode(errors="replace")


def _finite(value: float) -> float:
    return LEAST if math.isnan(value) else min(max(value, LEAST), -LEAST)
