"""Do greedy tokens through a hand-over equal those of one server that prefills itself?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from legs import Legs, gather

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 100, 127, 128, 129, 400, 511, 512, 513, 700, 1023, 1024, 1025, 1500)
COUNT = 64


def prompts(model: Path, text: str) -> list[list[int]]:
    """Pieces of a text, around the borders of blocks and of prefill's chunks."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    assert len(ids) > max(LENGTHS) + 37 * len(LENGTHS), "the text is too short"
    return [ids[37 * i : 37 * i + length] for i, length in enumerate(LENGTHS)]


async def equality(model: Path, text: str, pools: tuple[str, ...]) -> dict[str, Any]:
    """Compare each pool with ``whole``: one after the other, again (prefix hits), and eight at once."""
    asked = prompts(model, text)
    found: dict[str, Any] = {"prompts": len(asked), "tokens_each": COUNT}
    async with Legs() as legs:
        expected = [(await legs.routed(prompt, COUNT, "whole")).tokens for prompt in asked]
        assert all(len(tokens) == COUNT for tokens in expected)
        for pool in pools:
            for name, at_once in (("alone", 1), ("prefix_hits", 1), ("eight_at_once", 8)):
                traces = await gather([legs.routed(prompt, COUNT, pool) for prompt in asked], at_once)
                found[f"{pool}_{name}"] = _compared(traces, expected)
    return found


def _compared(traces: list[Any], expected: list[list[int]]) -> dict[str, Any]:
    errors = [str(trace) for trace in traces if isinstance(trace, BaseException)]
    pairs = [(t.tokens, e) for t, e in zip(traces, expected, strict=True) if not isinstance(t, BaseException)]
    unequal = [
        {"length": LENGTHS[i], "at": _first_difference(t.tokens, e)}
        for i, (t, e) in enumerate(zip(traces, expected, strict=True))
        if not isinstance(t, BaseException) and t.tokens != e
    ]
    out: dict[str, Any] = {"equal": sum(tokens == wanted for tokens, wanted in pairs)}
    if errors:
        out |= {"failed": len(errors), "first_failure": errors[0][:300]}
    if unequal:
        out["unequal"] = unequal
    return out


def _first_difference(mine: list[int], theirs: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
