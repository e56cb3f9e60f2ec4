"""A prompt's KV, made from its tokens, and the answer that a node gives that has exactly this KV.

Each layer has three planes, as TileRT's profiles lay them out: by token 512 e4m3 values with four float32 scales, by
token 64 bfloat16 values, and by page of 64 tokens the indexer's keys with their scales. Scales are 1, so that what a
receiver converts can be turned back, and the answer is a hash chain over every layer: one foreign byte changes it.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

LAYERS, LATENT, PAGE, PAGE_BYTES = 61, 512, 64, 8448
EOS = 256
ONE = struct.pack("<f", 1.0)


def planes(prompt: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns:
    ``kv`` [layers, tokens, 528], ``pe`` [layers, tokens, 128], ``ki`` [layers, pages, 8448]; bytes.
    """
    seed = int.from_bytes(hashlib.blake2b(repr(prompt).encode(), digest_size=8).digest(), "big")
    rng, tokens, pages = np.random.default_rng(seed), len(prompt), -(-len(prompt) // PAGE)
    kv = np.empty((LAYERS, tokens, LATENT + 16), np.uint8)
    kv[:, :, :LATENT] = rng.integers(0, 0x78, (LAYERS, tokens, LATENT), np.uint8)  # positive and finite
    kv[:, :, LATENT:] = np.frombuffer(ONE * 4, np.uint8)
    pe = rng.integers(0, 0x40, (LAYERS, tokens, 128), np.uint8)
    ki = np.empty((LAYERS, pages, PAGE_BYTES), np.uint8)
    ki[:, :, : PAGE * 128] = rng.integers(0, 0x78, (LAYERS, pages, PAGE * 128), np.uint8)
    ki[:, :, PAGE * 128 :] = np.frombuffer(ONE * PAGE, np.uint8)
    return kv, pe, ki


def digest(layers: list[tuple[bytes, bytes]]) -> bytes:
    """Of all layers: latent values and rotary part of each."""
    state = hashlib.blake2b(digest_size=16)
    for latent, rotary in layers:
        state.update(latent)
        state.update(rotary)
    return state.digest()


def digest_of(prompt: list[int]) -> bytes:
    kv, pe, _ = planes(prompt)
    return digest([(kv[n, :, :LATENT].tobytes(), pe[n].tobytes()) for n in range(LAYERS)])


def chain(start: bytes, count: int) -> list[int]:
    """Letters; about one in forty is the end of the sequence instead."""
    out, state = [], start
    for _ in range(count):
        state = hashlib.blake2b(state, digest_size=16).digest()
        out.append(EOS if state[1] < 6 else 97 + state[0] % 26)
    return out


def first_of(prompt: list[int]) -> int:
    """What prefill samples. A prompt that begins with ``!`` ends the answer at once."""
    return EOS if prompt[0] == ord("!") else 65 + sum(prompt) % 26


def answer_of(prompt: list[int], max_tokens: int) -> tuple[list[int], str]:
    """Tokens without the one that ended the answer, and why it ended."""
    first = first_of(prompt)
    if first == EOS:
        return [], "stop"
    rest = chain(digest_of(prompt), max_tokens - 1)
    if EOS in rest:
        return [first, *rest[: rest.index(EOS)]], "stop"
    return [first, *rest], "length"
