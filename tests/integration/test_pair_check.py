"""The self-check of a pair, against scripted vLLM servers whose answers depend on the KV that arrived."""

import asyncio
import json

import pytest
from aiohttp import web
from vllm_fakes import answer_of, world

from pdhub.router import paircheck


def checked(handoff="nixl", **options):
    """A world that need not become ready."""
    return world(handoff, router={"pair_check": True, "breaker_open_s": 0.2}, ready=False, **options)


async def ask(w):
    """Status and text of an answer."""
    status, body, _ = await w.ask(prompt="hello", max_tokens=4)
    return status, json.loads(body)["choices"][0]["text"] if status == 200 else None


RIGHT = (200, answer_of(list(b"hello"), 4))


async def state(w, until, within=5.0):
    """/ready, as soon as it says so."""
    async with asyncio.timeout(within):
        while True:
            async with w.running.http.get(w.running.url + "/ready") as reply:
                told = await reply.json()
            if until(told):
                return told
            await asyncio.sleep(0.02)


def verdict(word):
    return lambda told: set(told["pairs"].values()) == {word}


async def metrics(w):
    async with w.running.http.get(w.running.url + "/metrics") as reply:
        return await reply.text()


def damaged(w):
    """Another prompt's KV arrives."""
    honest = w.decode._receive

    async def receive(params, internal, prompt, body):
        return [*(await honest(params, internal, prompt, body))[:-1], 0]

    w.decode._receive = receive
    return lambda: setattr(w.decode, "_receive", honest)


@pytest.mark.parametrize("handoff", ["nixl", "nixl_push", "mooncake"])
async def test_a_pair_that_works_is_used(handoff):
    async with checked(handoff) as w:
        told = await state(w, verdict("good"))
        assert told["status"] == "ready"
        assert told["problems"] == []
        alone = [b for b in w.prefill.bodies if not b.get("kv_transfer_params")]
        assert len(alone) == 1
        assert alone[0]["cache_salt"]
        assert await ask(w) == RIGHT
        assert 'pdhub_router_pair_usable{node="d0",prefill="p0"} 1.0' in await metrics(w)
        assert 'pdhub_router_pair_checks_total{result="good"} 1.0' in await metrics(w)
        assert w.deaths == []


async def test_a_pair_that_answers_wrongly_is_not_used(caplog):
    async with checked(single=True) as w:
        repair = damaged(w)
        told = await state(w, verdict("bad"))
        assert any("pair p0 → d0: it answers" in problem for problem in told["problems"])
        assert any("no prefill instance has passed the self-check with it" in problem for problem in told["problems"])
        assert told["status"] == "ready"  # there is another pool
        assert "is not used" in caplog.text
        assert 'pdhub_router_pair_usable{node="d0",prefill="p0"} 0.0' in await metrics(w)
        before = len(w.decode.bodies)
        assert await ask(w) == RIGHT
        assert len(w.decode.bodies) == before
        repair()


async def test_without_another_pool_it_is_not_ready():
    async with checked() as w:
        damaged(w)
        told = await state(w, verdict("bad"))
        assert told["status"] == "not ready"
        assert await ask(w) == (503, None)


async def test_a_bad_pair_is_tried_again(monkeypatch):
    monkeypatch.setattr(paircheck, "AGAIN_S", 0.1)
    async with checked() as w:
        repair = damaged(w)
        await state(w, verdict("bad"))
        repair()
        await state(w, verdict("good"))
        assert await ask(w) == RIGHT


async def test_one_prompt_that_differs_is_a_near_tie():
    async with checked() as w:
        repair = damaged(w)
        honest, calls = w.decode._receive, []

        async def receive(*args):
            calls.append(1)
            if len(calls) == 2:
                repair()
            return await honest(*args)

        w.decode._receive = receive
        await state(w, verdict("good"))


async def test_a_transfer_that_fails_is_bad():
    async with checked() as w:

        async def receive(*args):
            raise ConnectionError

        w.decode._receive = receive
        await state(w, verdict("bad"))
        assert await ask(w) == (503, None)


async def test_a_node_that_returns_is_checked_again():
    async with checked() as w:
        await state(w, verdict("good"))
        port = w.decode.port
        await w.decode.close()
        await state(w, lambda told: told["pools"]["split"]["d0"] != "ready")
        damaged(w)
        await w.decode.start(port)
        told = await state(w, verdict("bad"))
        assert told["status"] == "not ready"


async def test_a_server_that_does_not_answer_alone_is_used_unchecked(caplog):
    async with checked() as w:
        honest = w.prefill._answer

        async def answer(request, body, chat):
            if not body.get("kv_transfer_params"):
                return web.json_response({"error": {"message": "no", "type": "x", "code": 400}}, status=400)
            return await honest(request, body, chat)

        w.prefill._answer = answer
        told = await state(w, verdict("unknown"))
        assert told["status"] == "ready"
        assert "is used unchecked" in caplog.text


async def test_a_mistake_in_a_plugin_does_not_hold_the_pair_for_ever(monkeypatch, caplog):
    def broken(self, *args):
        raise AttributeError("a mistake")

    monkeypatch.setattr(paircheck.PairChecker, "_over_both", broken)
    async with checked() as w:
        await state(w, verdict("unknown"))
        assert await ask(w) == RIGHT
        assert "the self-check failed: AttributeError('a mistake')" in caplog.text


async def test_nothing_is_learned_from_a_check():
    async with checked() as w:
        await state(w, verdict("good"))
        text = await metrics(w)
        assert "pdhub_router_requests_total{" not in text
        fleet = w.running.router.context.fleet
        assert fleet.latency.errors() == {}
        assert all(not endpoint.in_flight and not endpoint.pending_tokens for endpoint in fleet.endpoints())


async def test_it_can_be_switched_off():
    async with world("nixl") as w:
        told = await state(w, lambda told: told["status"] == "ready")
        assert told["pairs"] == {}
        assert w.prefill.bodies == []
