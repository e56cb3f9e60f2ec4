"""Any other tokenizer: decode a window of tokens with and without the new one; the difference is its text."""

from __future__ import annotations

from typing import Any, Final

MAX_HELD: Final = 8
"""Tokens after which text that ends with U+FFFD is shown all the same: no character has that many bytes."""


class WindowStream:
    """A window of a few tokens, so that the work a token does not grow with the answer."""

    def __init__(self, tokenizer: Any, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids: list[int] = []
        self._shown = 0  # how many of them are shown
        self._prefix = ""  # the text of those

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        held = len(self._ids) - self._shown
        if held < MAX_HELD and (text.endswith("\ufffd") or len(text) <= len(self._prefix)):
            return ""
        piece = text[len(self._prefix) :]
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        self._prefix = self._decode(self._ids)
        return piece

    def settle(self) -> None:
        """Nothing to do: what is not shown yet has no whole character."""

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""
