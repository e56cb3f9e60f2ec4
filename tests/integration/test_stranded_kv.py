"""A decode server that holds KV for nobody is told, taken out, and taken in when another process answers."""

import asyncio
import time

import pytest
from vllm_fakes import world

pytestmark = pytest.mark.integration

PUSH = {"options": {"engine_id": "e"}, "engine_id": "e"}


def metrics(kv, running=0):
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        'vllm:num_requests_waiting{engine="0"} 0\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {kv}\n'
    )


async def ready(w):
    async with w.running.http.get(w.running.url + "/ready") as reply:
        return reply.status, await reply.json()


async def until(w, state):
    """Until this is the state of d0 (None: it is not named)."""
    for _ in range(500):
        _, document = await ready(w)
        if document["stranded"].get("d0", {}).get("state") == state:
            return document
        await asyncio.sleep(0.02)
    raise AssertionError(document)


async def served_by(w, count=6):
    found = set()
    for n in range(count):
        status, body, headers = await w.ask(prompt=f"p{n}", max_tokens=2)
        assert status == 200, body
        found.add(headers["x-pdhub-node"])
    return found


async def test_it_is_taken_out_until_another_process_answers():
    recycle = {"after_s": 0.3, "nodes": ["d0"]}
    async with world("nixl_push", decodes=2, router={"recycle": recycle}, **PUSH) as w:
        w.decode.metrics = metrics(0.25)
        document = await until(w, "restart")
        assert document["stranded"]["d0"]["kv"] == 0.25
        assert document["status"] == "ready"
        assert any(problem.startswith("d0: draining (25.0% of its KV memory") for problem in document["problems"])
        assert await w.running.metric('pdhub_router_stranded_kv_ratio{node="d0"}') == 0.25
        assert await served_by(w) == {"d1"}
        port = w.decode.port
        await w.decode.close()
        node = w.running.router.context.fleet.pools["split"].nodes["d0"]
        while not node.gone:
            await asyncio.sleep(0.02)
        assert await served_by(w) == {"d1"}
        w.decode.metrics = metrics(0.0)
        await w.decode.start(port)
        await until(w, None)
        assert not (await ready(w))[1]["problems"]
        assert await w.running.metric("pdhub_router_stranded_kv_ratio") == 0
        while "d0" not in await served_by(w):
            await asyncio.sleep(0.02)


async def test_what_nobody_would_start_again_stays_in_and_is_told():
    async with world("nixl_push", router={"recycle": {"after_s": 0.3}}, **PUSH) as w:
        w.decode.metrics = metrics(0.25)
        document = await until(w, "held")
        assert (document["status"], document["problems"]) == ("ready", [])
        assert await w.running.metric('pdhub_router_stranded_kv_ratio{node="d0"}') == 0.25
        assert await served_by(w) == {"d0"}


async def test_what_answers_meanwhile_is_let_end():
    recycle = {"after_s": 0.3, "nodes": ["d0"]}
    async with world("nixl_push", decodes=2, router={"recycle": recycle}, **PUSH) as w:
        fleet = w.running.router.context.fleet
        node = fleet.pools["split"].nodes["d0"]
        w.decode.metrics = metrics(0.25)
        while not node.retiring:
            await asyncio.sleep(0.005)
        node.count(+1, time.monotonic())  # had been chosen, and comes only now
        for _ in range(20):
            assert (await ready(w))[1]["stranded"]["d0"]["state"] == "draining"
            await asyncio.sleep(0.02)
        node.count(-1, time.monotonic())
        w.decode.metrics = metrics(0.3, running=1)  # of another router
        await asyncio.sleep(0.3)
        assert (await ready(w))[1]["stranded"]["d0"]["state"] == "draining"
        w.decode.metrics = metrics(0.25)
        await until(w, "restart")


async def test_a_server_that_does_not_tell_everything_is_never_suspected():
    recycle = {"after_s": 0.1, "nodes": ["d0"]}
    async with world("nixl_push", decodes=2, router={"recycle": recycle}, **PUSH) as w:
        w.decode.metrics = metrics(0.25).split("\n", 1)[1]
        node = w.running.router.context.fleet.pools["split"].nodes["d0"]
        while node.load.running is not None or node.load.kv_usage != 0.25:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.6)
        assert (await ready(w))[1]["stranded"] == {}


async def test_a_retry_does_not_go_where_it_was_taken_out_meanwhile():
    async with world("nixl_push", decodes=2, router={"retries": 1}, **PUSH) as w:
        node = w.running.router.context.fleet.pools["split"].nodes["d1"]

        async def fail(request):
            node.retiring = "taken out"  # while the first attempt runs
            w.running.router.context.fleet.changed(node)
            request.transport.abort()

        w.decode.script = fail
        for n in range(8):
            status, body, _ = await w.ask(prompt=f"p{n}", max_tokens=2)
            if node.retiring:
                break
        assert (status, node.in_flight) == (502, 0), body
