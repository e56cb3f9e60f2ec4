"""Greedy token ids through every pool equal those of one server alone; and KV really came over the wire."""

from __future__ import annotations

import pytest
from calls import at_once, token_ids, tokenize
from prompts import prompts

TREES = ("tiny", "mooncake", "mla", "smol")


@pytest.fixture(scope="module")
def asked(world, full):
    """The tree's prompts, and how many tokens each is answered with."""
    count, tokens = {"smol": (50, 16) if full else (5, 16), "mla": (50, 24) if full else (20, 24)}.get(
        world.name, (50, 24)
    )
    return prompts(world.kind, count, lambda text: tokenize(world.single.url, text)), tokens


@pytest.fixture(scope="module")
def expected(world, asked):
    """What the single server answers, asked directly."""
    found, tokens = asked
    return at_once(2, lambda prompt: token_ids(world.single.url, prompt.ids, tokens), found)


@pytest.mark.world(*TREES)
def test_ids_equal_the_single_servers(world, pool, asked, expected):
    found, tokens = asked
    before = world.server(pool).transferred()
    got = at_once(
        3,
        lambda item: token_ids(world.router_url, item[1].ids, tokens, world.via(pool), stream=item[0] % 2 == 1),
        list(enumerate(found)),
    )
    _same(got, expected, [f"{i}: {p.why} ({len(p.ids)} tokens)" for i, p in enumerate(found)])
    if pool != "whole":
        # Blocks that decode has in its own cache are not sent again; most prompts share nothing.
        assert world.server(pool).transferred() - before > sum(len(p.ids) for p in found) / 4


@pytest.mark.world("tiny", "smol")
def test_all_pools_at_once(world, asked, expected):
    """One router: neighbours of a request are in other pools, and its KV goes another way."""
    found, tokens = asked
    work = [(i, pool) for i in range(min(12, len(found))) for pool in world.pools]
    got = at_once(
        len(world.pools) * 2,
        lambda item: token_ids(world.router_url, found[item[0]].ids[::-1], tokens, world.via(item[1])),
        work,
    )
    alone = {i: token_ids(world.single.url, found[i].ids[::-1], tokens) for i in {i for i, _ in work}}
    _same(got, [alone[i] for i, _ in work], [f"{pool}, {found[i].why}" for i, pool in work])


@pytest.mark.world("mla")
def test_drafts_are_accepted_on_decode(world, asked, expected):
    """The single server has no drafts, so that they cannot be wrong on both sides alike."""
    found, tokens = asked
    before = world.server("pull").metrics()
    assert token_ids(world.router_url, found[1].ids[::-1], tokens, world.via("pull"))
    after = world.server("pull").metrics()
    assert after["spec_decode_num_accepted_tokens_total"] > before["spec_decode_num_accepted_tokens_total"]
    assert "spec_decode_num_drafts_total" in world.server("prefill-pull").metrics()
    assert "spec_decode_num_drafts_total" not in world.single.metrics()


@pytest.mark.world(*TREES)
def test_nothing_is_held_afterwards(world, pool, expected):
    for name in {pool, f"prefill-{pool}"} & world.servers.keys():
        world.server(name).wait_idle()


def _same(got, expected, names):
    wrong = {name: (a, b) for name, a, b in zip(names, got, expected, strict=True) if a != b}
    assert not wrong, f"{len(wrong)} of {len(names)} differ: {wrong}"
