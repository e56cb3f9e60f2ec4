"""What one vLLM server answers, asked directly: every tree of its kind must answer the same, over any transport."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from calls import at_once, post, token_ids, tokenize
from prompts import Prompt, prompts
from world import World

LONGER = [5] * 900
"""Few bytes a token; the router learns bytes per token from what it sees."""


@dataclass(frozen=True)
class Alone:
    """``ids[i]`` answer ``asked[i]`` with ``tokens`` tokens, ``longer`` answers :data:`LONGER`."""

    asked: list[Prompt]
    tokens: int
    ids: list[list[int]]
    longer: list[int]
    logprobs: list[float]


def ask_alone(world: World, count: int, tokens: int) -> Alone:
    """Ask the tree's server that prefills itself."""
    url = world.single.url
    asked = prompts(world.kind, count, lambda text: tokenize(url, text))
    ids = at_once(4, lambda prompt: token_ids(url, prompt.ids, tokens), asked)
    return Alone(asked, tokens, ids, token_ids(url, LONGER, 8), logprobs(url))


def logprobs(url: str, headers: Mapping[str, str] | None = None) -> list[float]:
    """Of six greedy tokens."""
    body = {"model": "m", "prompt": [7] * 40, "max_tokens": 6, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    status, text = post(f"{url}/v1/completions", body, headers)
    assert status == 200, text
    return list(json.loads(text)["choices"][0]["logprobs"]["token_logprobs"])
