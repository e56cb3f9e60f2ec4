"""Log probabilities in OpenAI's two formats.

One entry for each counted token, in order: also for the token that ended the answer and for those whose text a stop
string cut away, as vLLM gives them, so that there are always ``completion_tokens`` entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdhub.api.engine import TokenLogprob
from pdhub.router.presentation.text import TextDecoder

LEAST: Final = -9999.0
"""In place of minus infinity, which JSON cannot say; vLLM's number."""

LOST: Final = "\ufffd"
CONTEXT: Final = 4
"""Tokens before one that may complete its character: a character has no more bytes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One token of an answer. ``offset``: where its text starts, in characters of the whole text."""

    token_id: int
    offset: int
    logprob: TokenLogprob | None = None


class LogprobFormat:
    """Renders the entries of one answer, each once and in order.

    A token that is part of a character has no text of its own: as in vLLM it is named by an empty string, and the
    token that completes the character by the whole of it.

    Args:
        text: for the tokens' text.
        top: alternatives a token.
        ids_for_text: name tokens ``token_id:N`` instead.
    """

    def __init__(self, text: TextDecoder, top: int, *, ids_for_text: bool = False) -> None:
        self._text = text
        self._top = top
        self._ids_for_text = ids_for_text
        self._before: list[int] = []  # the last tokens of the answer

    def chat(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """The ``logprobs`` member of a chat choice. The token itself is the first of its alternatives."""
        return {"content": [self._chat_entry(logprob) for _, logprob in self._given(entries)]}

    def completions(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """The ``logprobs`` member of a completions choice. Its alternatives include the token itself."""
        out: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for offset, logprob in self._given(entries):
            out["text_offset"].append(offset)
            out["token_logprobs"].append(_finite(logprob.logprob))
            out["tokens"].append(self._name(logprob.token_id))
            alternatives: dict[str, float] = {}
            for token_id, value in self._ordered(logprob)[: self._top + 1]:
                alternatives.setdefault(self._name(token_id), _finite(value))
            out["top_logprobs"].append(alternatives)
        return out

    def _given(self, entries: Sequence[Entry]) -> Iterator[tuple[int, TokenLogprob]]:
        for entry in entries:
            if entry.logprob:
                yield entry.offset, entry.logprob
            self._before = [*self._before, entry.token_id][-CONTEXT:]

    def _chat_entry(self, logprob: TokenLogprob) -> dict[str, Any]:
        top = [self._pair(token_id, value) for token_id, value in self._ordered(logprob)[: self._top]]
        return {**self._pair(logprob.token_id, logprob.logprob), "top_logprobs": top}

    def _ordered(self, logprob: TokenLogprob) -> list[tuple[int, float]]:
        """The token itself, then the others, best first."""
        others = [pair for pair in logprob.top if pair[0] != logprob.token_id]
        return [(logprob.token_id, logprob.logprob), *others[: self._top]]

    def _pair(self, token_id: int, value: float) -> dict[str, Any]:
        name = self._name(token_id)
        return {"token": name, "logprob": _finite(value), "bytes": list(name.encode())}

    def _name(self, token_id: int) -> str:
        if self._ids_for_text:
            return f"token_id:{token_id}"
        name = self._text.token_text(token_id)
        return self._completed(token_id) if name.endswith(LOST) else name

    def _completed(self, token_id: int) -> str:
        """What becomes of a part of a character behind the tokens before it; empty if it stays one."""
        for size in range(1, len(self._before) + 1):
            before = self._before[-size:]
            whole = self._plain([*before, token_id])
            if whole.endswith(LOST):
                continue
            while before and self._text.token_text(before[-1]).endswith(LOST):
                before.pop()
            return whole.removeprefix(self._plain(before))
        return ""

    def _plain(self, token_ids: Sequence[int]) -> str:
        return b"".join([self._text.token_bytes(i) for i in token_ids]).decode(errors="replace")


def _finite(value: float) -> float:
    return LEAST if math.isnan(value) else min(max(value, LEAST), -LEAST)
