"""Inside one vLLM server: most KV has left before the prompt is computed, and nothing of vLLM was replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from calls import get, post
from kinds import KINDS, SERVER_ARGS, SERVER_ENV
from topology import SHIMS, Ports
from world import wait_for

from pdhub.api import GroupKind, KVGroup, KVLayout
from pdhub.transports.plugin import ShmConfig
from pdhub.transports.shm import ShmTransport
from pdhub.wire.control import Done, Join
from tests.unit.sender.fakenode import FakeNode

CHUNK, PROMPT = 128, 1024


class Node(FakeNode):
    """Notes when the first byte of each block of a landing was there."""

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout, PROMPT, ShmTransport(ShmConfig()))
        self.seen: dict[int, float] = {}

    def default(self, message):
        reply = super().default(message)
        if isinstance(message, Join):
            view = self.landings[message.transfer_id].view
            view[:] = bytes(len(view))
            threading.Thread(target=self._watch, args=(view,), daemon=True).start()
        return reply

    def _watch(self, view: memoryview) -> None:
        group = self.layout.groups[0]
        count = group.blocks(PROMPT)
        last = np.frombuffer(view, np.uint64).reshape(count, -1)[:, -1]  # of each block of tokens, over all layers
        done = False
        while len(self.seen) < count and not done:
            done, now = bool(self.got(Done)), time.monotonic()  # and one look after it
            for block in np.flatnonzero(last):
                self.seen.setdefault(int(block), now)
            time.sleep(0.002)


@pytest.fixture(scope="module")
def traced(model, vllm, tmp_path_factory):
    """A server with the traced connector: its address, the connector's, and the trace."""
    directory, ports = tmp_path_factory.mktemp("traced"), Ports()
    port, told, trace = ports.take(), ports.take(), tmp_path_factory.getbasetemp() / "trace.jsonl"
    transfer = {
        "kv_connector": "TracedConnector",
        "kv_connector_module_path": "traced_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"transport": "shm", "port": told},
    }
    command = [
        str(vllm), "serve", str(model(KINDS["tiny"].model)), "--served-model-name", "m", "--port", str(port),
        "--host", "127.0.0.1", "--max-model-len", "2048", "--max-num-batched-tokens", str(CHUNK),
        "--kv-cache-memory-bytes", "128M", "--kv-transfer-config", json.dumps(transfer), *SERVER_ARGS,
    ]  # fmt: skip
    env = {**os.environ, **SERVER_ENV, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SHIMS), "PDHUB_TRACE": str(trace)}
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(
            lambda: server.poll() is not None or get(f"http://127.0.0.1:{port}/health")[0] == 200,
            600,
            lambda: (directory / "log").read_text()[-3000:],
        )
        assert server.poll() is None, (directory / "log").read_text()[-3000:]
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{told}", trace
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def told_layout(url):
    document = json.loads(get(f"{url}/prefill")[1])
    raw = document["layout"]
    groups = tuple(
        KVGroup(**{**g, "kind": GroupKind(g["kind"]), "layers": tuple(g["layers"]), "axes": tuple(g["axes"])})
        for g in raw["groups"]
    )
    layout = KVLayout(raw["model"], raw["version"], raw["shards"], groups)
    assert layout.fingerprint == document["fingerprint"]
    return layout


def lines(trace):
    return [json.loads(line) for line in trace.read_text().splitlines()]


def hand_over(url, node, transfer_id, prompt):
    params = node.params(transfer_id)
    asked = {name: getattr(params, name) for name in params.__struct_fields__}
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"pdhub": asked}}
    status, text = post(f"{url}/v1/completions", body)
    assert status == 200, text
    return json.loads(text)["kv_transfer_params"]


def test_most_bytes_have_arrived_before_the_last_chunk_is_computed(traced):
    url, told, trace = traced
    node = Node(told_layout(told))
    try:
        hand_over(url, node, "warm", [3] * PROMPT)
        wait_for(lambda: len(node.got(Done)) == 1, 30, lambda: str(node.messages))
        node.close()
        node = Node(told_layout(told))
        before = len(lines(trace))
        answer = hand_over(url, node, "t", [i % 200 + 3 for i in range(PROMPT)])
        assert answer == {"pdhub": {"transfer_id": "t", "tokens": PROMPT}}
        wait_for(lambda: node.got(Done), 30, lambda: str(node.messages))
        wait_for(lambda: len(node.seen) >= PROMPT // 16, 30, lambda: str(len(node.seen)))
        steps = [line for line in lines(trace)[before:] if "computed" in line]
        assert [step["computed"] for step in steps] == list(range(CHUNK, PROMPT + 1, CHUNK))
        over = steps[-1]["forward_over"]
        for step in steps:
            there = sum(at <= step["forward_over"] for at in node.seen.values())
            print(f"{step['computed']} tokens computed, {there * 16} arrived")
        early = sum(at <= over for at in node.seen.values()) / len(node.seen)
        print(f"{early:.1%} of the bytes were there when the last of {len(steps)} chunks was computed")
        assert early >= 0.85
    finally:
        node.close()


def test_nothing_of_vllm_is_replaced(traced):
    url, told, trace = traced
    node = Node(told_layout(told))
    try:
        hand_over(url, node, "t", [9] * 100)
        wait_for(lambda: node.got(Done), 30, lambda: str(node.messages))
    finally:
        node.close()
    assert post(f"{url}/v1/completions", {"model": "m", "prompt": [5] * 40, "max_tokens": 4})[0] == 200
    looks = [line for line in lines(trace) if "changed" in line]
    assert len(looks) >= 2
    for look in looks:
        assert look["looked_at"] > 1000
        assert look["changed"] == []


@pytest.mark.parametrize(
    "params", [None, {"do_remote_decode": False}, {"pdhub": 5}, {"pdhub": {"transfer_id": 1}}], ids=str
)
def test_other_requests_and_junk_are_answered(traced, params):
    url, _, _ = traced
    body = {"model": "m", "prompt": [5] * 40, "max_tokens": 4, "kv_transfer_params": params}
    status, text = post(f"{url}/v1/completions", body)
    assert status == 200, text
    told = json.loads(text).get("kv_transfer_params")
    assert (told is None) == (params is None or "pdhub" not in params)
    assert get(f"{url}/health")[0] == 200


def test_a_node_that_is_not_there_costs_only_its_own_request(traced):
    url, told, _ = traced
    node = Node(told_layout(told))
    node.close()
    hand_over(url, node, "t", [9] * 300)
    status, text = post(f"{url}/v1/completions", {"model": "m", "prompt": [5] * 40, "max_tokens": 4})
    assert status == 200, text
    metrics = lambda: get(f"{url}/metrics")[1]  # noqa: E731
    wait_for(lambda: 'kv_cache_usage_perc{engine="0",model_name="m"} 0.0' in metrics(), 30, metrics)
