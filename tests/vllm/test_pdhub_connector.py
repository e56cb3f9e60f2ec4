"""Real vLLM prefills, pdhub's connector streams, `pdhub node` decodes with transformers: ids equal one server's."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from calls import at_once, post, token_ids, tokenize
from kinds import KINDS
from pdhub_worlds import NODES, TREES, PDHubWorld, with_nodes
from prompts import prompts
from world import wait_for

TOKENS = 64


@pytest.fixture(scope="module", params=list(TREES))
def tree(request, model, vllm, tmp_path_factory):
    """A running tree with the pool ``nodes``."""
    name = request.param
    only = os.environ.get("PDHUB_VLLM_POOLS")
    if only is not None and name not in only.split(","):
        pytest.skip("left out by PDHUB_VLLM_POOLS")
    found = TREES[name]
    if name in ("nixl", "mooncake") and (why := _lacks(vllm, name)):
        pytest.skip(why)
    world = PDHubWorld(
        found.kind, found.pools, model(KINDS[found.kind].model), vllm, tmp_path_factory.mktemp(name), with_nodes(found)
    )
    try:
        world.start()
        yield world
    finally:
        world.close()


@pytest.fixture(scope="module")
def asked(tree, full):
    count = 50 if full else 20
    return prompts(tree.kind, count, lambda text: tokenize(tree.single.url, text))


@pytest.fixture(scope="module")
def expected(tree, asked):
    return at_once(2, lambda prompt: token_ids(tree.single.url, prompt.ids, TOKENS), asked)


def test_ids_equal_the_single_servers_one_by_one_and_eight_at_once(tree, asked, expected):
    for count in (1, 8):
        got = at_once(count, lambda p: token_ids(tree.router_url, p.ids, TOKENS, tree.via(NODES)), asked)
        wrong = [f"{p.why} ({len(p.ids)} tokens)" for p, a, b in zip(asked, got, expected, strict=True) if a != b]
        assert not wrong, f"{count} at once: {wrong}\n{tree.log()}"


def test_nothing_is_left_on_either_side(tree, asked):
    at_once(8, lambda p: token_ids(tree.router_url, p.ids, 4, tree.via(NODES)), asked[:8])
    tree.prefill.wait_idle()
    wait_for(lambda: not tree.node_load()["leases"], 30, lambda: str(tree.node_load()))
    assert not tree.node_load().get("quarantined")


def test_requests_of_two_kinds_in_the_same_steps(tree, asked, expected):
    """Half of the requests are vLLM's own hand-over's, in the same prefill instance."""
    if "pull" not in tree.pools:
        pytest.skip("no pool of vLLM's own")
    work = [(i, pool) for i in range(12) for pool in ("pull", NODES)]
    got = at_once(8, lambda w: token_ids(tree.router_url, asked[w[0]].ids, TOKENS, tree.via(w[1])), work)
    wrong = [(pool, asked[i].why) for (i, pool), ids in zip(work, got, strict=True) if ids != expected[i]]
    assert not wrong, tree.log()


def test_a_prompt_longer_than_the_router_thought_is_claimed_again(tree):
    """Text of few bytes a token; the router learns bytes per token from what it sees."""
    ids = [5] * 900
    if tree.kind.chunk < 900 and tree.name == "mla":
        pytest.skip("a prompt must fit one step there")
    want = token_ids(tree.single.url, ids, 8)
    assert token_ids(tree.router_url, ids, 8, tree.via(NODES)) == want


def test_a_prompt_beyond_the_context_is_the_clients_mistake(tree):
    body = {"model": "m", "prompt": [5] * (tree.kind.context - 4), "max_tokens": 64}
    status, text = post(f"{tree.router_url}/v1/completions", body, tree.via(NODES))
    assert status == 400, text


def test_sampling_and_logprobs_come_from_both_halves(tree):
    body = {"model": "m", "prompt": [7] * 40, "max_tokens": 6, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    documents = []
    for url, headers in ((tree.single.url, None), (tree.router_url, tree.via(NODES))):
        status, text = post(f"{url}/v1/completions", body, headers)
        assert status == 200, text
        documents.append(json.loads(text)["choices"][0]["logprobs"]["token_logprobs"])
    assert documents[0] == pytest.approx(documents[1], abs=1e-3)


def _lacks(vllm, plugin):
    """Why a transport cannot be used in vLLM's environment; empty if it can."""
    code = f"import pdhub_{plugin}, {'nixl' if plugin == 'nixl' else 'mooncake.engine'}"
    found = subprocess.run([vllm.parent / "python", "-c", code], capture_output=True, text=True)
    return "" if found.returncode == 0 else f"{plugin}: {found.stderr[-200:]}"
