"""Prompts at the edges: one token around a block's end, more than a chunk, a prefix that is cached already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kinds import Kind

_TEXT = (
    "The keeper of the lighthouse wrote down every ship that passed: its name, its flag, its cargo and the hour. When "
    "the fog came he rang the bell twice a minute, and in winter he counted the days until the mail boat. His sister "
    "lived in the village behind the dunes. She baked bread, repaired nets and taught the children to read the stars. "
    "One autumn a stranger with a wooden case arrived on foot. He said that he measured the height of the tides, and "
    "that the moon had a plan of which nobody had told the harbour master. They let him sleep in the store, between "
    "barrels of oil and coils of rope, and in the morning his bed was empty and the case stood open on the stairs. "
)


@dataclass(frozen=True)
class Prompt:
    """``why`` goes into the message of a failed comparison."""

    why: str
    ids: list[int]


def prompts(kind: Kind, count: int, tokenize: Callable[[str], list[int]]) -> list[Prompt]:
    """The same every time. Of five, the first is long and the others are at the edges of a block; further ones add
    blocks, lengths in between and prompts that share their beginning."""
    chunked = kind.chunk + kind.block // 2
    longest = min(kind.context - 64, 2 * kind.chunk + kind.block + 1)
    edges = [(f"{k} blocks {d:+}", k * kind.block + d) for k in (1, 2, 3) for d in (-1, 0, 1)]
    lengths = [
        ("more than a chunk", min(chunked, longest)),
        *edges[:3],
        ("begins as the first", kind.block * 2 + 7),
        *edges[3:],
        ("one token", 1),
        ("a few", 5),
        ("many chunks", longest),
        ("begins as the first, all of it and more", min(chunked + 3, longest)),
        ("the first again", min(chunked, longest)),
    ]
    base = tokenize(_TEXT)
    out: list[Prompt] = []
    for number in range(count):
        # Beyond the edges lengths are below a chunk: the larger model computes 200 tokens a second here.
        spread = 1 + 37 * number % (kind.chunk - kind.block)
        why, length = lengths[number] if number < len(lengths) else (f"length {spread}", spread)
        start = 0 if why.startswith(("begins as", "the first", "more than")) else 11 + 29 * number
        out.append(Prompt(why, [base[(start + i) % len(base)] for i in range(length)]))
    return out
