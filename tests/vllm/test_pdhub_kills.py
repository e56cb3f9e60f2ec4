"""vLLM as prefill, or the node, is killed at every state of a lease: who waits is told, nothing is held, all goes on.

The normal selection kills twice; `make test-vllm-full` both of them three times a state.
"""

from __future__ import annotations

import time

import pytest
from calls import at_once, post, token_ids
from fault_table import TABLE, Row
from faults import IDLE_S, new_prompt
from kinds import KINDS
from pdhub_stage import STATES, TOKENS, LeaseStage, node_idle, node_pid, one_slot
from pdhub_worlds import NODES, PDHubWorld, Tree, with_nodes
from world import wait_for

pytestmark = pytest.mark.timeout(1800)

NEXT = 6
TOLD_S, COMPUTED_S = 5.0, 20.0
IN_CI = {"writing": "prefill", "decoding": "node"}
"""Who is killed in the normal selection: each start of vLLM takes half a minute."""


def _scope(fixture_name, config):
    """`pdhub up` gives up on what dies nine times in a row within a minute of its last start: on a fast machine, on a
    node that is killed for test after test."""
    return "function" if config.getoption("--vllm-full", default=False) else "module"


@pytest.fixture(scope=_scope, params=["shm", "tcp"])
def tree(request, model, vllm, tmp_path_factory, full):
    """A running tree; its node has one slot."""
    transport = request.param
    if transport == "tcp" and not full:
        pytest.skip("only in the full run")
    nodes = with_nodes(Tree("tiny", ("whole",), {"type": transport}))

    def change(document):
        nodes(document)
        one_slot(document)

    directory = tmp_path_factory.mktemp(f"kills-{transport}")
    world = PDHubWorld("tiny", ("whole",), model(KINDS["tiny"].model), vllm, directory, change)
    world.transport = transport
    try:
        world.start()
        yield world
    finally:
        world.close()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("victim", ["node", "prefill"])
def test_killed(tree, full, victim, state):
    if not full and IN_CI.get(state) != victim:
        pytest.skip("only in the full run")
    found = [_kill(tree, victim, state) for _ in range(3 if full else 1)]
    seen = sorted({text for texts, _, _ in found for text in texts})
    fault = f"{'vLLM' if victim == 'prefill' else 'node'} killed, lease {state}, {len(found)}×"
    row = Row(f"pdhub {tree.transport}", fault, ", ".join(seen), *(max(f[i] for f in found) for i in (1, 2)), NEXT)
    TABLE.append(row)


def _kill(tree, victim, state):
    """What the clients saw, the longest time until one of them was told, and the time until all was idle."""
    wait_for(tree.prefill.alive, 300, lambda: f"no vLLM\n{tree.log()}")  # a kill that failed left it so
    wait_for(lambda: node_idle(tree), 300, lambda: f"no idle node\n{tree.log()}")
    tree.wait_ready()
    tree.warm()
    stage = LeaseStage(tree)
    with stage.held_in(state) as (asked, frozen):
        since = killed = stage.kill(victim)
        if frozen is not None and victim == "node":
            frozen.thaw()  # a stopped vLLM tells nobody anything
            since = time.monotonic()
        for one in asked:
            one.join(90)
            assert one.ended, f"{one} has no end\n{tree.log()}"
            _right_status(one, victim, state)
    told = max((one.ended_at - since for one in asked if one.seen() != "200"), default=0.0)
    # A prompt for a node that has gone is computed all the same; vLLM's answer says what became of its KV.
    within_s = COMPUTED_S if victim == "node" and frozen is not None else TOLD_S
    assert told <= within_s + _lag(tree), f"told after {told:.1f} s"
    if victim == "node":
        tree.prefill.wait_idle(max(1.0, killed + IDLE_S - time.monotonic()))
    else:
        wait_for(lambda: node_idle(tree), max(1.0, killed + IDLE_S - time.monotonic()), lambda: str(tree.node_load()))
    idle_s = time.monotonic() - killed
    _comes_back(tree, stage, victim)
    assert _next_right(tree) == NEXT, tree.log()
    wait_for(lambda: node_idle(tree), 60, lambda: str(tree.node_load()))
    tree.prefill.wait_idle()
    return {one.seen() for one in asked}, max(0.0, told), idle_s


def _right_status(one, victim, state):
    seen = one.seen()
    if state == "quarantined":
        assert seen == "(left)", str(one)
    elif victim == "prefill" and state in ("ready", "decoding"):
        assert seen == "200", f"vLLM has done its part: {one}"
    elif one.status == 200:
        assert seen.startswith("200, then event"), str(one)
        assert b"[DONE]" not in one.data
    else:
        assert one.status in (502, 503), str(one)


def _comes_back(tree, stage, victim):
    """The killed one does; the others were not touched."""
    if victim == "prefill":
        wait_for(tree.prefill.alive, 300, lambda: f"vLLM has not come back\n{tree.log()}")
    else:
        wait_for(lambda: node_idle(tree), 300, lambda: f"the node has not come back\n{tree.log()}")
    tree.wait_ready()
    # One that failed twice in a row is out for two seconds, of which `/ready` says nothing.
    wait_for(lambda: _answers(tree), 60, lambda: f"nobody answers\n{tree.log()}")
    for server in tree.servers.values():
        if server.name != tree.prefill.name or victim == "node":
            assert (server.pid, server.engine_pid) == stage.pids[server.name], f"{server.name} died too"
    assert (node_pid(tree) == stage.node_pid) == (victim == "prefill")


def _answers(tree):
    body = {"model": "m", "prompt": "and now", "max_tokens": 2}
    return post(f"{tree.router_url}/v1/completions", body, tree.via(NODES))[0] == 200


def _next_right(tree):
    prompts = [new_prompt(60 + 170 * number) for number in range(NEXT)]
    want = at_once(2, lambda prompt: token_ids(tree.single.url, prompt, TOKENS), prompts)
    got = at_once(3, lambda prompt: token_ids(tree.router_url, prompt, TOKENS, tree.via(NODES)), prompts)
    return sum(a == b for a, b in zip(got, want, strict=True))


def _lag(tree):
    """What the machine adds just now: the time of an answer that costs nothing."""
    began = time.monotonic()
    tree.ready()
    return time.monotonic() - began
