"""Real vLLM prefills, pdhub's connector streams, `pdhub node` decodes with transformers: KV and ids are right."""

from __future__ import annotations

import os
import subprocess

import pytest
from alone import LONGER, Alone, ask_alone, logprobs
from calls import at_once, post, token_ids
from injected import Own, target, worst
from kinds import KINDS
from pdhub_worlds import NODES, TREES, PDHubWorld, with_nodes
from world import wait_for

ASKED = {"tiny": (20, 64), "mla": (20, 64), "smol": (4, 16)}
"""Prompts, and tokens of each answer; in the full run 50 and 64."""

EQUAL_TO = 1e-5

ALONE: dict[str, Alone] = {}
"""By kind. Only the first tree of a kind starts the server that is compared with."""


@pytest.fixture(scope="module", params=list(TREES))
def tree(request, model, vllm, tmp_path_factory, full):
    """A running tree with the pool ``nodes``."""
    name = request.param
    only = os.environ.get("PDHUB_VLLM_POOLS")
    found = TREES[name]
    if found.full and not full:
        pytest.skip("only in the full run")
    if only is not None and name not in only.split(","):
        pytest.skip("left out by PDHUB_VLLM_POOLS")
    if (plugin := found.transport["type"]) in ("nixl", "mooncake") and (why := _lacks(vllm, plugin)):
        pytest.skip(why)
    change = with_nodes(found, alone=found.kind not in ALONE)
    directory = model(KINDS[found.kind].model)
    world = PDHubWorld(found.kind, found.pools, directory, vllm, tmp_path_factory.mktemp(name), change)
    try:
        world.start()
        yield world
    finally:
        world.close()


@pytest.fixture(scope="module")
def alone(tree, full):
    """What one server answers."""
    kind = tree.name
    if kind not in ALONE:
        ALONE[kind] = ask_alone(tree, *((50, 64) if full else ASKED[kind]))
    return ALONE[kind]


async def test_injected_kv_equals_what_transformers_computes(tree, model, alone):
    """Every layer of every token, around block and chunk borders, and of prompts that vLLM has in its cache."""
    own = Own(model(tree.kind.model))
    asked = alone.asked[:6]
    differences = {}
    async with target(tree) as node:
        for prompt in (*asked, asked[0]):
            kept, first = await node.hand_over(prompt.ids)
            differences[f"{prompt.why} ({len(prompt.ids)} tokens)"] = worst(kept, own.kv(prompt.ids, first))
    print(f"largest difference of {len(kept)} caches: {max(differences.values())}")
    assert max(differences.values())[0] < EQUAL_TO, differences


def test_ids_equal_the_single_servers_one_by_one_and_eight_at_once(tree, alone):
    work = list(zip(alone.asked, alone.ids, strict=True))
    for count, some in ((1, work if tree.name != "smol" else work[:10]), (8, work)):
        got = at_once(count, lambda p: token_ids(tree.router_url, p[0].ids, alone.tokens, tree.via(NODES)), some)
        wrong = [f"{p.why} ({len(p.ids)} tokens)" for (p, ids), found in zip(some, got, strict=True) if ids != found]
        assert not wrong, f"{count} at once: {wrong}\n{tree.log()}"


def test_nothing_is_left_on_either_side(tree, alone):
    at_once(8, lambda p: token_ids(tree.router_url, p.ids, 4, tree.via(NODES)), alone.asked[:8])
    tree.prefill.wait_idle()
    wait_for(lambda: not tree.node_load()["leases"], 30, lambda: str(tree.node_load()))
    assert not tree.node_load().get("quarantined")


@pytest.mark.parametrize("tree", [name for name, tree in TREES.items() if tree.shared], indirect=True)
def test_requests_of_two_kinds_in_the_same_steps(tree, alone):
    """Half of the requests are vLLM's own hand-over's, in the same prefill instance."""
    work = [(i, pool) for i in range(12) for pool in ("pull", NODES)]
    got = at_once(8, lambda w: token_ids(tree.router_url, alone.asked[w[0]].ids, alone.tokens, tree.via(w[1])), work)
    wrong = [(pool, alone.asked[i].why) for (i, pool), ids in zip(work, got, strict=True) if ids != alone.ids[i]]
    assert not wrong, tree.log()


def test_a_prompt_longer_than_the_router_thought_is_claimed_again(tree, alone):
    assert token_ids(tree.router_url, LONGER, 8, tree.via(NODES)) == alone.longer


def test_a_prompt_beyond_the_context_is_the_clients_mistake(tree):
    body = {"model": "m", "prompt": [5] * (tree.kind.context - 4), "max_tokens": 64}
    status, text = post(f"{tree.router_url}/v1/completions", body, tree.via(NODES))
    assert status == 400, text


def test_sampling_and_logprobs_come_from_both_halves(tree, alone):
    assert logprobs(tree.router_url, tree.via(NODES)) == pytest.approx(alone.logprobs, abs=1e-3)


def _lacks(vllm, plugin):
    """Why a transport cannot be used in vLLM's environment; empty if it can."""
    code = f"import pdhub_{plugin}, {'nixl' if plugin == 'nixl' else 'mooncake.engine'}"
    found = subprocess.run([vllm.parent / "python", "-c", code], capture_output=True, text=True)
    return "" if found.returncode == 0 else f"{plugin}: {found.stderr[-200:]}"
