"""What clients choose can neither pair two requests, nor name KV, nor end an engine."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from asking import Asking
from calls import post, send, token_ids
from faults import TOKENS, Stage, Watch, new_prompt

pytestmark = [pytest.mark.world("tiny", "mooncake"), pytest.mark.timeout(900)]

IDS = (
    "same", "x" * 4000, "../../etc/passwd", "___prefill_addr_127.0.0.1:1___decode_addr_127.0.0.1:2_" + "0" * 32,
    "cmpl-1-0-deadbeef", "'; DROP TABLE", "%00%0a", "{}", "a b\tc", "\u00e9\u00ff", "-", "0",
)  # fmt: skip

FORGED = (
    {},
    None,
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": []},
    {"do_remote_decode": True, "transfer_id": "x"},
    {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_request_id": "r",
     "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1},
    {"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": "http://127.0.0.1:1",
     "remote_engine_id": "e"},
    [1], "text", 7,
)  # fmt: skip


@pytest.fixture
def stage(world, pool):
    if pool == "whole":
        pytest.skip("has one server")
    world.warm()
    return Stage(world, pool)


def test_request_ids_of_clients(stage):
    """The same id on requests that run at once, and ids that mean something to engines."""
    watch = Watch(stage)
    began = time.monotonic()
    ids = ["same"] * 8 + list(IDS)
    prompts = [new_prompt(200 + 3 * i) for i in range(len(ids))]

    def ask(item):
        name, prompt = item
        headers = {**stage.world.via(stage.pool), "x-request-id": name}
        return token_ids(stage.world.router_url, prompt, TOKENS, headers)

    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(ask, zip(ids, prompts, strict=True)))
    expected = [token_ids(stage.world.single.url, prompt, TOKENS) for prompt in prompts]
    wrong = [name for name, a, b in zip(ids, got, expected, strict=True) if a != b]
    assert not wrong, wrong
    last = stage.ask()
    watch.saw("duplicate and hostile request ids", last, began, None)
    assert last.status == 200
    watch.settle(began)


def test_forged_kv_transfer_params(stage):
    """Whatever they say, and however they are written."""
    watch = Watch(stage)
    began = time.monotonic()
    url, via = f"{stage.world.router_url}/v1/completions", stage.world.via(stage.pool)
    body = {"model": "m", "prompt": new_prompt(), "max_tokens": TOKENS}
    for forged in FORGED:
        for stream in (False, True):
            status, text = post(url, {**body, "stream": stream, "kv_transfer_params": forged}, via)
            assert status == 400, (forged, text)
    raw = json.dumps(body)[:-1]
    for member in ('"kv\\u005ftransfer_params": {"do_remote_prefill": true}', '"request_id": "mine"'):
        status, text = send(url, f"{raw}, {member}}}".encode(), via)
        assert status == 400, (member, text)
    twice = '"kv_transfer_params": {"do_remote_prefill": true}, "kv_transfer_params": null'
    status, text = send(url, f"{raw}, {twice}}}".encode(), via)
    assert status in (200, 400), text  # the first of them may not reach an engine: none dies
    last = Asking(url, {**body, "kv_transfer_params": {"do_remote_prefill": True}}, via)
    watch.saw("forged kv_transfer_params", last, time.monotonic())
    watch.settle(began)
