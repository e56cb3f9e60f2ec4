"""Greedy token ids through every pool equal those of one server alone; and KV really came over the wire."""

from __future__ import annotations

import pytest
from calls import at_once, token_ids, tokenize
from prompts import prompts


@pytest.fixture(scope="module")
def expected(world, full):
    """Prompts of the tree, how many tokens of each, and what the single server answers."""
    small = world.name == "smol" and not full
    count, tokens = (5, 16) if small else (50, 24)
    asked = prompts(world.kind, count, lambda text: tokenize(world.single.url, text))
    return tokens, asked, at_once(2, lambda p: token_ids(world.single.url, p.ids, tokens), asked)


@pytest.mark.world("tiny", "mooncake", "mla", "smol")
def test_ids_equal_the_single_servers(world, pool, expected):
    tokens, asked, answers = expected
    before = world.server(pool).transferred()
    got = at_once(
        3,
        lambda item: token_ids(world.router_url, item[1].ids, tokens, world.via(pool), stream=item[0] % 2 == 1),
        list(enumerate(asked)),
    )
    wrong = {
        f"{i}: {p.why} ({len(p.ids)} tokens)": (got[i], answers[i]) for i, p in enumerate(asked) if got[i] != answers[i]
    }
    assert not wrong, f"{len(wrong)} of {len(asked)} differ: {wrong}"
    if pool != "whole":
        # Blocks that decode has cached are not sent again; most prompts share nothing.
        assert world.server(pool).transferred() - before > sum(len(p.ids) for p in asked) / 4


@pytest.mark.world("tiny", "mooncake", "mla", "smol")
def test_nothing_is_held_afterwards(world, pool, expected):
    for name in {pool, f"prefill-{pool}"} & world.servers.keys():
        world.server(name).wait_idle()
