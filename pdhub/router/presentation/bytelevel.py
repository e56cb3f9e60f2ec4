"""Byte-level BPE: each character of a token stands for one byte (the table that GPT-2 introduced)."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Final


def _byte_of_character() -> dict[str, int]:
    """Printable bytes stand for themselves; the others were moved, in order, to the characters from 256 on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in itself}
    moved = (byte for byte in range(256) if chr(byte) not in table)
    table.update({chr(256 + n): byte for n, byte in enumerate(list(moved))})
    return table


LOST: Final = "\ufffd"
_BYTES: Final = _byte_of_character()


def bytelevel_bytes(token: str) -> bytes:
    """Bytes of one token. A token with a character outside the table (an added one) is plain text."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


class ByteLevelStream:
    """Bytes through an incremental UTF-8 decoder.

    Text waits while it ends with an unfinished character, or with bytes that are none: as in vLLM it is shown with what
    follows it, and not at all if nothing does.
    """

    __slots__ = ("_bytes", "_decoder", "_held", "_hidden")

    def __init__(self, token_bytes: Callable[[int], bytes], hidden: frozenset[int]) -> None:
        self._bytes = token_bytes
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: str | None = None

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        data = self._bytes(token_id)
        if self._held is None and data.isascii():
            return data.decode()
        text = (self._held or "") + self._decoder.decode(data)
        if text.endswith(LOST) or self._decoder.getstate()[0]:
            self._held = text
            return ""
        self._held = None
        return text

    def settle(self) -> None:
        if self._held is not None:
            self._held = ""
