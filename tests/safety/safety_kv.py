"""KV that says whose it is: every 16 bytes name their transfer, their prompt, their layer and their token.

So a node can tell, at any moment and without knowing the request, whether its landing holds another one's bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from pdhub.api import GroupKind, KVGroup, KVLayout

LAYERS: Final = 4
BLOCK: Final = 4
ENTRY: Final = 512
"""Bytes of one token in one layer: large enough that a write takes a while."""

CHUNK: Final = 16
CONTEXT: Final = 256
CAPACITY: Final = 96
"""Tokens of a landing. All are alike, so that one's memory is soon another's."""

UNTOUCHED: Final = 0xA5
"""What a landing is filled with when it is claimed."""

LAYOUT: Final = KVLayout(
    model="safety",
    version=1,
    shards=1,
    groups=(
        KVGroup(
            name="kv",
            kind=GroupKind.FULL,
            layers=tuple(range(LAYERS)),
            block_tokens=BLOCK,
            block_bytes=BLOCK * ENTRY,
            axes=(f"token:{BLOCK}", f"byte:{ENTRY}"),
            dtype="uint8",
        ),
    ),
)

_UNIT: Final = np.dtype([("transfer", "u8"), ("prompt", "u4"), ("token", "u2"), ("layer", "u1"), ("rest", "u1")])

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def prompt_mark(prompt: Sequence[int]) -> int:
    """Of a prompt, as its KV carries it."""
    return int.from_bytes(hashlib.blake2b(bytes(prompt), digest_size=4).digest(), "little")


def kv(transfer_id: str, prompt: Sequence[int], start: int, stop: int) -> Bytes:
    """The bytes of the blocks that hold the tokens ``start`` to ``stop``, in the layout's order."""
    first, blocks = start // BLOCK, -(-stop // BLOCK) - start // BLOCK
    units = np.zeros((blocks, LAYERS, BLOCK, ENTRY // _UNIT.itemsize), _UNIT)
    token = np.arange(first * BLOCK, (first + blocks) * BLOCK).reshape(blocks, 1, BLOCK, 1)
    units["transfer"] = _transfer_mark(transfer_id)
    units["prompt"] = prompt_mark(prompt)
    units["token"] = token
    units["layer"] = np.arange(LAYERS).reshape(1, LAYERS, 1, 1)
    units["rest"] = 1
    units[np.broadcast_to(token >= len(prompt), units.shape)] = np.zeros((), _UNIT)
    return units.reshape(-1).view(np.uint8)


def differs(region: memoryview, transfer_id: str, prompt: Sequence[int]) -> str:
    """How a landing is not exactly this prompt's KV, and untouched behind it; empty if it is."""
    found = np.frombuffer(region, np.uint8)
    want = np.full(len(found), UNTOUCHED, np.uint8)
    mine = kv(transfer_id, prompt, 0, len(prompt))
    want[: len(mine)] = mine
    wrong = np.flatnonzero(found != want)
    return f"{len(wrong)} of {len(found)} bytes differ, the first at {wrong[0]}" if len(wrong) else ""


def foreign(region: memoryview, transfer_id: str) -> str:
    """Where a landing holds another transfer's bytes; empty if it does not.

    Any part of the own KV may be missing. One wrong byte is not another's: a test may turn a bit on purpose. What is
    looked at is a copy, because a fenced landing's writer may still write into it.
    """
    marks = np.array(region, np.uint8).reshape(-1, _UNIT.itemsize)[:, :8]
    mine = np.frombuffer(_transfer_mark(transfer_id).to_bytes(8, "little"), np.uint8)
    strange = (marks != mine) & (marks != UNTOUCHED) & (marks != 0)
    wrong = np.flatnonzero(strange.sum(axis=1) >= 2)
    return f"{len(wrong)} of {len(marks)} units are another's, the first is number {wrong[0]}" if len(wrong) else ""


def mark_in(region: memoryview) -> int:
    """The prompt that a landing's first unit names."""
    return int(np.frombuffer(region, _UNIT, 1)["prompt"][0])


def letter(mark: int, position: int) -> int:
    """The token at a position (0 is prefill's) of the answer to the prompt with this mark."""
    return 97 + hashlib.blake2b(b"%d %d" % (mark, position), digest_size=1).digest()[0] % 26


def answer(prompt: str, tokens: int) -> str:
    """The whole of it, as text."""
    mark = prompt_mark(prompt.encode())
    return "".join(chr(letter(mark, position)) for position in range(tokens))


def _transfer_mark(transfer_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(transfer_id.encode(), digest_size=8).digest(), "little")
