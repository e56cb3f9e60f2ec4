"""A prefill instance over real sockets, against a node that is a script: faults that a healthy node never shows."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import pytest

from pdhub.api import TransportSpec
from pdhub.node.prefill import PrefillServer
from pdhub.testing import toy
from pdhub.wire.control import Done, Hello, Join, Leave, RefusedCode, Revoke
from tests.unit.prefill_host.planned import make_plan
from tests.unit.sender.fakenode import FakeNode, HeldTransport

pytestmark = pytest.mark.integration

CHUNK = 16
LAYOUT = toy.ToyConfig().layout()


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come true"
        await asyncio.sleep(0.005)


class Host:
    """A prefill instance with a transport that the test controls."""

    def __init__(self, server: PrefillServer, transport: HeldTransport, http: aiohttp.ClientSession) -> None:
        self.server, self.transport, self.http = server, transport, http

    async def post(self, prompt: str, node: FakeNode | None, transfer_id: str = "t1", **more: Any) -> tuple[int, Any]:
        body = {"model": "toy", "prompt": prompt, "max_tokens": 1, "return_token_ids": True, **more}
        if node is not None:
            params = msgspec.to_builtins(node.params(transfer_id, budget_s=more.pop("budget_s", 10.0)))
            body = {k: v for k, v in body.items() if k != "budget_s"}
            body["kv_transfer_params"] = {"pdhub": params}
        async with self.http.post(f"{self.server.url}/v1/completions", json=body) as reply:
            return reply.status, await reply.json()


@pytest.fixture
def node() -> Any:
    made = FakeNode(LAYOUT, capacity=512)
    yield made
    made.close()


@pytest.fixture
async def host(request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    options = {"chunk_tokens": CHUNK, **getattr(request, "param", {})}
    before = {t.ident for t in threading.enumerate()}
    transport = HeldTransport()
    spec = TransportSpec(name="memory", summary="held", factory=lambda config: transport)
    limit = options.pop("queue_limit", 256)
    plan = make_plan(prefill=options, transport=spec, admission={"queue_limit": limit}, handoff={"verify": True})
    server = PrefillServer(plan, plan.config.prefill[0])
    await server.start()
    async with aiohttp.ClientSession() as http:
        yield Host(server, transport, http)
    await server.close()
    await server.close()
    left = [t.name for t in threading.enumerate() if t.ident not in before and t.name.startswith("pdhub")]
    assert not left
    assert server.active == 0


PROMPT = "abcdefghij" * 8  # five chunks


async def test_an_answer_and_the_kv(host: Host, node: FakeNode) -> None:
    status, answer = await host.post(PROMPT, node, logprobs=1)
    assert status == 200
    choice = answer["choices"][0]
    assert choice["token_ids"] == toy.generate(PROMPT.encode(), 1)
    assert choice["prompt_token_ids"] == answer["prompt_token_ids"] == list(PROMPT.encode())
    assert choice["pdhub_logprob"][0] == choice["token_ids"][0]
    await until(lambda: node.got(Done))
    assert node.got(Done)[0].nbytes == LAYOUT.landing_bytes(80)
    await until(lambda: host.server.active == 0)


async def test_without_a_hand_over_it_only_answers(host: Host, node: FakeNode) -> None:
    status, answer = await host.post(PROMPT, None)
    assert status == 200
    assert answer["choices"][0]["token_ids"] == toy.generate(PROMPT.encode(), 1)
    assert not node.messages


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        (RefusedCode.TOO_SMALL, 409, "landing_too_small"),
        (RefusedCode.CONTEXT, 400, "context_length_exceeded"),
        (RefusedCode.LAYOUT, 502, "layout_mismatch"),
        (RefusedCode.UNKNOWN, 502, "transfer_failed"),
        (RefusedCode.STALE, 502, "transfer_failed"),
        (RefusedCode.DRAINING, 503, "admission_rejected"),
    ],
)
async def test_refusals_cost_no_prefill(host: Host, node: FakeNode, code: str, status: int, error: str) -> None:
    node.refuse(code, need=80)
    got, body = await host.post(PROMPT, node)
    assert (got, body["error"]["code"]) == (status, error)
    if status == 409:
        assert body["error"]["need"] == 80
    assert not host.transport.peers  # nothing was even connected


async def test_a_prompt_beyond_the_context_is_refused_in_vllms_words(host: Host, node: FakeNode) -> None:
    status, body = await host.post("x" * 512, node)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "prompt")
    assert body["error"]["message"].startswith(
        "This model's maximum context length is 512 tokens. However, you requested 513 tokens (512 in the messages"
    )
    assert not node.messages


async def test_an_unreachable_node_is_a_failed_transfer(host: Host, node: FakeNode) -> None:
    node.close()
    status, body = await host.post(PROMPT, node)
    assert (status, body["error"]["code"]) == (502, "transfer_failed")


@pytest.mark.parametrize("host", [{"chunk_ms": 30}], indirect=True)
async def test_a_client_that_leaves_stops_the_work_and_leaves_the_landing(host: Host, node: FakeNode) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await host.post(PROMPT, node)
    await until(lambda: node.got(Leave))
    assert node.got(Leave)[0].stopped
    await until(lambda: host.server.active == 0)
    assert not node.got(Done)
    assert next(host.transport.writes) < 5  # not all chunks were computed


@pytest.mark.parametrize("host", [{"chunk_ms": 40}], indirect=True)
async def test_who_leaves_while_waiting_is_dropped_at_once(host: Host, node: FakeNode) -> None:
    first = asyncio.create_task(host.post(PROMPT, node, "t0"))
    await until(lambda: host.transport.peers)
    waiting = [asyncio.create_task(host.post(PROMPT, node, f"w{i}")) for i in range(10)]
    await until(lambda: len(node.got(Join)) == 11)
    for task in waiting:
        task.cancel()
    await until(lambda: len(node.got(Leave)) == 10)
    assert not first.done()
    last = asyncio.create_task(host.post("short", node, "t2"))
    assert (await first)[0] == 200
    assert (await last)[0] == 200
    # five chunks and one: none of the ten was computed
    await until(lambda: len(node.got(Done)) == 2)
    assert next(host.transport.writes) == 6


@pytest.mark.parametrize("host", [{"chunk_ms": 30}], indirect=True)
async def test_a_revoke_fails_the_request(host: Host, node: FakeNode) -> None:
    asked = asyncio.create_task(host.post(PROMPT, node))
    await until(lambda: host.transport.peers)
    node.say(Revoke("t1", 1, "deadline"))
    status, body = await asked
    assert (status, body["error"]["code"]) == (502, "transfer_failed")
    await until(lambda: node.got(Leave))


@pytest.mark.parametrize("host", [{"chunk_ms": 30}], indirect=True)
async def test_a_node_that_vanishes_fails_the_request(host: Host, node: FakeNode) -> None:
    asked = asyncio.create_task(host.post(PROMPT, node))
    await until(lambda: host.transport.peers)
    node.vanish()
    status, body = await asked
    assert (status, body["error"]["code"]) == (502, "transfer_failed")
    assert (await host.post(PROMPT, None))[0] == 200


async def test_a_node_that_does_not_answer_holds_up_nobody(host: Host, node: FakeNode) -> None:
    silent = FakeNode(LAYOUT)
    silent.answer = lambda message: silent.default(message) if isinstance(message, Hello) else None
    try:
        stuck = [asyncio.create_task(host.post(PROMPT, silent, f"s{i}", budget_s=0.5)) for i in range(6)]
        await until(lambda: len(silent.got(Join)) == 6)
        assert (await host.post(PROMPT, node))[0] == 200
        assert {(await task)[0] for task in stuck} == {502}
    finally:
        silent.close()


@pytest.mark.parametrize("host", [{"chunk_tokens": 4}], indirect=True)
async def test_a_node_that_takes_no_bytes_holds_up_nobody(host: Host, node: FakeNode) -> None:
    stalled = FakeNode(LAYOUT, capacity=512)
    host.transport.held.add(stalled.transport)
    try:
        stuck = [asyncio.create_task(host.post(PROMPT, stalled, f"s{i}")) for i in range(3)]
        await until(lambda: len(host.transport.posted()) >= 8)
        for i in range(3):
            assert (await host.post(PROMPT, node, f"t{i}"))[0] == 200
        assert not any(task.done() for task in stuck)
        host.transport.held.clear()
        host.transport.let_go()
        assert {(await task)[0] for task in stuck} == {200}
        await until(lambda: len(stalled.got(Done)) == 3)
    finally:
        stalled.close()


async def test_writes_that_end_too_late_are_left(host: Host, node: FakeNode) -> None:
    host.transport.held.add(node.transport)
    status, _ = await host.post("abc", node, budget_s=0.3)
    assert status == 200  # the answer does not wait for the bytes
    await until(lambda: node.got(Leave))
    await until(lambda: host.server.active == 0)
    assert not node.got(Done)


@pytest.mark.parametrize("host", [{"chunk_ms": 40, "queue_limit": 2}], indirect=True)
async def test_the_waiting_list_is_bounded(host: Host) -> None:
    tasks = [asyncio.create_task(host.post(PROMPT, None)) for _ in range(8)]
    statuses = sorted([(await task)[0] for task in tasks])
    assert statuses == [200] * 3 + [429] * 5


@pytest.mark.parametrize("host", [{"chunk_ms": 20}], indirect=True)
async def test_drain_ends_what_is_open_and_refuses_what_is_new(host: Host, node: FakeNode) -> None:
    asked = asyncio.create_task(host.post(PROMPT, node))
    await until(lambda: host.transport.peers)
    draining = asyncio.create_task(host.server.drain(10))
    await asyncio.sleep(0)
    status, body = await host.post("x", None)
    assert (status, body["error"]["code"]) == (503, "admission_rejected")
    async with host.http.get(f"{host.server.url}/health") as reply:
        assert reply.status == 503
    assert (await asked)[0] == 200
    assert await draining
    await until(lambda: node.got(Done))


@pytest.mark.parametrize("host", [{"chunk_ms": 50}], indirect=True)
async def test_closing_stops_what_is_open(host: Host, node: FakeNode) -> None:
    asked = asyncio.create_task(host.post(PROMPT, node))
    await until(lambda: host.transport.peers)
    await host.server.close()
    assert (await asked)[0] == 499
    await until(lambda: node.got(Leave))


async def test_bad_bodies(host: Host) -> None:
    url = f"{host.server.url}/v1/completions"
    async with host.http.post(url, data=b"{") as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["type"] == "invalid_request_error"
    async with host.http.post(url, data=io.BytesIO(b" " * (9 << 20))) as reply:
        assert reply.status == 413
    async with host.http.post(url, json={"model": "nope", "prompt": "x", "max_tokens": 1}) as reply:
        assert reply.status == 404
        assert (await reply.json())["error"]["code"] == "model_not_found"


async def test_what_it_says_of_itself(host: Host) -> None:
    async with host.http.get(f"{host.server.url}/v1/models") as reply:
        assert [(m["id"], m["max_model_len"]) for m in (await reply.json())["data"]] == [("toy", 512)]
    async with host.http.get(f"{host.server.url}/prefill") as reply:
        info = await reply.json()
        assert info["fingerprint"] == LAYOUT.fingerprint
        assert info["max_model_len"] == 512
        assert info["eos_token_ids"] == [256]
    await host.post("x", None)
    async with host.http.get(f"{host.server.url}/metrics") as reply:
        assert 'pdhub_prefill_requests_total{outcome="ok"} 1.0' in await reply.text()
