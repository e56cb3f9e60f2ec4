"""Token ids to text, piece by piece. Uses the ``tokenizers`` library only.

Most models decode a token to the same bytes wherever it stands. For those a table of bytes and an incremental UTF-8
decoder are exact: a character is shown when its last byte came, and a byte that fits no character becomes U+FFFD as
soon as a character follows. The two families that this covers are byte-level BPE (Llama 3, Qwen, SmolLM2 …) and
sentencepiece with byte fallback (Llama 2, Mistral, Gemma …). Everything else goes through
:class:`~pdhub.router.presentation.window.WindowStream`, which decodes a short window again and again.

Text continues the prompt: the last prompt tokens are decoded first and thrown away, because a tokenizer may drop
the space before the very first word of a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from pdhub.api.errors import ConfigError
from pdhub.router.presentation.bytelevel import ByteLevelStream, bytelevel_bytes
from pdhub.router.presentation.fallback import FallbackStream, fallback_bytes, strips_space
from pdhub.router.presentation.window import WindowStream

CONTEXT: Final = 5
"""Prompt tokens that are decoded before the first output token, as in vLLM."""


class TextStream(Protocol):
    """One answer's text, piece by piece. What is left of an unfinished character at the end is no text, as in vLLM."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; often empty."""

    def settle(self) -> None:
        """What came so far is not this answer's: none of its text is to be shown."""


class TextDecoder:
    """A tokenizer's way from ids to text. Made once a model and shared; its streams are one an answer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        self._convert: Callable[[str], bytes] | None = None
        self._strip = strips_space(decoder)
        if decoder.get("type") == "ByteLevel":
            self._convert = bytelevel_bytes
        elif self._strip is not None:
            self._convert = fallback_bytes

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special ones included; empty for an id that the tokenizer does not know."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; U+FFFD for what is no whole character."""
        known = self._texts.get(token_id)
        if known is None:
            known = self._texts[token_id] = self.token_bytes(token_id).decode(errors="replace")
        return known

    def stream(self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> TextStream:
        """A new stream that continues the prompt ``after``."""
        hidden = self._special if skip_special_tokens else frozenset()
        stream: TextStream
        if self._convert is None:
            stream = WindowStream(self._tokenizer, hidden)
        elif self._strip is None:
            stream = ByteLevelStream(self.token_bytes, hidden)
        else:
            stream = FallbackStream(self._tokenizer.id_to_token, self.token_bytes, hidden, strip=self._strip)
        for token_id in after[-CONTEXT:]:
            stream.push(token_id)
        stream.settle()
        return stream

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> str:
        """The whole text at once; what a stream's pieces add up to."""
        stream = self.stream(skip_special_tokens=skip_special_tokens, after=after)
        return "".join([stream.push(i) for i in ids])

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._convert is None:
            return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()
        return self._convert(token)


def load_text_decoder(path: str) -> TextDecoder:
    """The decoder of a Hugging Face directory or a ``tokenizer.json``.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    from tokenizers import Tokenizer

    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"no tokenizer at {file}",
            where="model.tokenizer",
            hint="name a directory that has a tokenizer.json, or that file itself",
        )
    try:
        return TextDecoder(Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"cannot read the tokenizer {file}: {error}", where="model.tokenizer") from error
