"""Sentencepiece with byte fallback: ``▁`` is a space, ``<0xE4>`` is a byte, and a text's first space is dropped."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from pdhub.router.presentation.bytelevel import LOST

SPACE: Final = "▁"
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_COMMON: Final = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]


def strips_space(decoder: Mapping[str, Any]) -> bool | None:
    """Whether this decoder drops a text's first space; None if it is of another kind.

    Args:
        decoder: the ``decoder`` section of a tokenizer.json.
    """
    steps = decoder.get("decoders") or []
    if decoder.get("type") != "Sequence" or steps[: len(_COMMON)] != _COMMON:
        return None
    rest = steps[len(_COMMON) :]
    if not rest:
        return False
    return True if rest == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] else None


def fallback_bytes(token: str) -> bytes:
    """Bytes of one token."""
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(SPACE, " ").encode()


class FallbackStream:
    """Text tokens as they are, byte tokens gathered to characters.

    A character is shown as soon as it is whole. Bytes that make none become one U+FFFD each, with the text behind them;
    without any they are not shown. (The library gives up a whole run of byte tokens for one bad byte in it; a stream
    cannot, for it has already shown the characters before.)
    """

    def __init__(
        self,
        token_of: Callable[[int], str | None],
        token_bytes: Callable[[int], bytes],
        hidden: frozenset[int],
        *,
        strip: bool,
    ) -> None:
        self._token_of = token_of
        self._bytes = token_bytes
        self._hidden = hidden
        self._strip = strip
        self._run = b""
        self._held = ""

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        piece = self._bytes(token_id)
        if len(piece) == 1 and _BYTE.fullmatch(self._token_of(token_id) or ""):
            self._run += piece
            return self._shown(self._characters())
        return self._shown(self._lost() + piece.decode())

    def settle(self) -> None:
        self._held = ""

    def _shown(self, text: str) -> str:
        text = self._held + text
        if text.endswith(LOST) or self._run:
            self._held = text
            return ""
        self._held = ""
        return self._stripped(text)

    def _characters(self) -> str:
        shown = ""
        while self._run:
            try:
                shown += self._run.decode()
            except UnicodeDecodeError as error:
                if error.end == len(self._run) and error.reason == "unexpected end of data":
                    return shown
                shown += LOST
                self._run = self._run[1:]
            else:
                self._run = b""
        return shown

    def _lost(self) -> str:
        lost, self._run = LOST * len(self._run), b""
        return lost

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
