"""Digests of a prompt's beginnings: requests that begin alike have the first of them in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

BLOCK_BYTES = 512
"""About 128 tokens of text: what is shared is known to that precision, and prompts below it have no digest."""

MAX_BLOCKS = 256
"""Further blocks have none: the 128 KiB before them tell prompts apart well enough."""

_LIMIT = BLOCK_BYTES * MAX_BLOCKS


def prefix_of(body: Mapping[str, Any], chat: bool) -> tuple[int, ...]:
    """One number a block, each of everything from the start to the end of that block; shortest first.

    Args:
        body: validated.

    Nothing of the prompt can be read from them. They have 53 bits, so that JSON readers keep all of them.
    """
    text = bytearray()
    for piece in _pieces(body, chat):
        text += piece
        if len(text) >= _LIMIT:
            break
    state = blake2b(_salt(body), digest_size=8)
    digests = []
    for start in range(0, min(len(text), _LIMIT) - BLOCK_BYTES + 1, BLOCK_BYTES):
        state.update(text[start : start + BLOCK_BYTES])
        digests.append(int.from_bytes(state.copy().digest(), "little") >> 11)
    return tuple(digests)


def share_of_block(body: Mapping[str, Any], chat: bool) -> float:
    """The part of the prompt's text that one block is; more than 1 for a short one."""
    return BLOCK_BYTES / max(1, sum(len(piece) for piece in _pieces(body, chat, None)))


def _salt(body: Mapping[str, Any]) -> bytes:
    """Engines keep the caches of different salts apart."""
    salt = body.get("cache_salt")
    return salt[:256].encode(errors="surrogatepass") if isinstance(salt, str) else b""


def _pieces(body: Mapping[str, Any], chat: bool, limit: int | None = _LIMIT) -> Iterator[bytes]:
    """The prompt in the order in which a template would render it. Only as much as counts is encoded.

    Args:
        limit: characters of each piece; None = all.
    """
    if not chat:
        prompt = body["prompt"]
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        yield _encoded(prompt, limit)
        return
    if tools := body.get("tools"):
        yield msgspec.json.encode(tools)
    for message in body["messages"]:
        yield f"\0{message['role'][:64]}\0".encode(errors="surrogatepass")
        content = message.get("content")
        if isinstance(content, str):
            yield _encoded(content, limit)
        elif isinstance(content, list):
            for part in content:
                text = part.get("text") if isinstance(part, dict) else part
                if isinstance(text, str):
                    yield _encoded(text, limit)


def _encoded(prompt: str | list[int], limit: int | None) -> bytes:
    if isinstance(prompt, str):
        return prompt[:limit].encode(errors="surrogatepass")
    # Each id ends with a comma, so that what a prompt begins with is what its bytes begin with.
    return msgspec.json.encode(prompt[: None if limit is None else limit // 2])[1:-1] + b","
