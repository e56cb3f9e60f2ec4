"""What was decided and what would be: debug headers, /debug/decisions, the decision log and POST /explain."""

import asyncio
import json

import pytest
from router_fakes import TEXT, Engine, answer_json, answer_never, router_before

from pdhub.core.latency import Sample

pytestmark = pytest.mark.integration

ANSWER = {"object": "text_completion", "choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
TIGHT = {"x-slo-tpot-ms": "10"}
POLICY = {
    "type": "slo",
    "rules": [{"name": "batch", "match": {"priority": {"below": 0}}, "pools": ["general"], "fallback": []}],
}


def pools():
    return {"fast": [Engine(answer_json(ANSWER))], "general": [Engine(answer_json(ANSWER)) for _ in range(3)]}


async def get(hub, path):
    async with hub.http.get(hub.url + path) as reply:
        return reply.status, await reply.json()


async def explain(hub, body=TEXT, **headers):
    status, raw, _ = await hub.post(body, "/explain", **headers)
    return status, json.loads(raw)


async def test_headers_say_what_was_decided(tmp_path):
    async with router_before(pools(), policy=POLICY) as hub:
        _, _, headers = await hub.post({**TEXT, "priority": 1})
        assert (headers["x-pdhub-policy"], headers["x-pdhub-rule"]) == ("slo", "batch")
        assert headers["x-pdhub-reason"] == "rule"
        assert headers["x-pdhub-policy-version"] == hub.router.context.rules.version
        assert "x-pdhub-predicted-ttft-ms" not in headers
        now = hub.router.context.clock()
        for n in range(3):
            seen = Sample("general", f"general-{n}", now, prompt_tokens=3, ttft_ms=20.0, tpot_ms=5.0)
            hub.router.context.fleet.latency.observe(seen)
        await asyncio.sleep(0.1)
        _, _, headers = await hub.post({**TEXT, "priority": 0}, **{"x-slo-tpot-ms": "40"})
        assert "x-pdhub-rule" not in headers
        assert headers["x-pdhub-pool"] == "general"
        assert 10 < float(headers["x-pdhub-predicted-ttft-ms"]) < 40
        assert 2 < float(headers["x-pdhub-predicted-tpot-ms"]) < 10


async def test_a_dry_run_decides_like_the_request_and_changes_nothing(tmp_path):
    async with router_before(pools(), policy=POLICY) as hub:
        await hub.post(TEXT)
        await hub.idle()
        context = hub.router.context
        before = (context.rng.getstate(), len(context.records), await hub.metric("pdhub_router_requests_total"))
        status, first = await explain(hub, **TIGHT, **{"x-request-id": "q"})
        _, second = await explain(hub, **TIGHT, **{"x-request-id": "q"})
        assert status == 200
        assert first == second
        after = (context.rng.getstate(), len(context.records), await hub.metric("pdhub_router_requests_total"))
        assert before == after
        assert sum(len(pool.nodes) for pool in context.fleet.pools.values()) == len(first["candidates"]) == 4
        assert first["request"]["slo"]["tpot_ms"] == 10
        assert first["version"] == context.rules.version
        batch = {**TEXT, "priority": 3}
        _, told = await explain(hub, batch)
        _, _, headers = await hub.post(batch)
        assert (told["pool"], told["rule"], told["reason"]) == ("general", "batch", headers["x-pdhub-reason"])
        assert headers["x-pdhub-pool"] == "general"


async def test_a_dry_run_sees_the_fleet_as_it_is(tmp_path):
    async with router_before(pools(), policy=POLICY) as hub:
        _, told = await explain(hub, {**TEXT, "n": 2})
        assert told["pool"] is not None
        chat = {"model": "alias", "messages": [{"role": "user", "content": "hi"}]}
        _, told = await explain(hub, chat)
        assert (told["request"]["endpoint"], told["request"]["model"]) == ("/v1/chat/completions", "m")


@pytest.mark.parametrize(("body", "status"), [({**TEXT, "model": "x"}, 404), ({"model": "m"}, 400), (b"{", 400)])
async def test_a_request_that_would_be_refused_is_refused(tmp_path, body, status):
    async with router_before(pools(), policy=POLICY) as hub:
        found, told = await explain(hub, body)
        assert found == status
        assert told["error"]["message"]


async def test_a_dry_run_of_too_much_is_refused(tmp_path):
    async with router_before(pools(), policy=POLICY, router={"body_limit_bytes": 1000}) as hub:
        found, told = await explain(hub, {**TEXT, "prompt": "x" * 2000})
        assert (found, told["error"]["code"]) == (413, "request_too_large")


async def test_decisions_are_there_while_and_after_the_request_runs(tmp_path):
    engines = {"fast": [Engine(answer_json(ANSWER))], "general": [Engine(answer_never)]}
    async with router_before(engines, policy={"type": "slo", "config": {"throughput": "general"}}) as hub:
        slow = asyncio.create_task(hub.post(TEXT))
        for _ in range(100):
            _, told = await get(hub, "/debug/decisions")
            if told["decisions"]:
                break
            await asyncio.sleep(0.02)
        (entry,) = told["decisions"]
        assert (entry["pool"], entry["reason"], entry["outcome"]) == ("general", "no-slo", None)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        await hub.idle()
        _, told = await get(hub, "/debug/decisions")
        assert told["decisions"][0]["outcome"]["outcome"] == "cancelled"
        assert len(told["decisions"][0]["candidates"]) == 2


async def test_nobody_is_a_decision_with_a_reason(tmp_path):
    pool = {"only": [Engine(answer_json(ANSWER))]}
    async with router_before(pool, policy={"type": "slo"}, options={"features": []}) as hub:
        status, _, _ = await hub.post({**TEXT, "temperature": 1})
        assert status == 400
        _, told = await get(hub, "/debug/decisions")
        assert (told["decisions"][0]["pool"], told["decisions"][0]["reason"]) == (None, "no-capable-pool")
        assert told["decisions"][0]["candidates"][0]["dropped_by"] == "capability"


async def test_every_look_of_a_retry_is_one_entry(tmp_path):
    broken = Engine(answer_json({"error": {"message": "no"}}, status=500))
    async with router_before({"a": [broken], "b": [Engine(answer_json(ANSWER))]}, policy={"type": "slo"}) as hub:
        status, _, headers = await hub.post(TEXT)
        _, told = await get(hub, "/debug/decisions")
        (entry,) = told["decisions"]
        assert (status, headers["x-pdhub-pool"], entry["outcome"]["pool"]) == (200, "b", "b")
        assert entry["outcome"]["attempts"] == 2
        assert entry["looks"] >= 2


async def test_a_sample_of_the_decisions_is_written(tmp_path):
    file = tmp_path / "decisions.jsonl"
    router = {"decisions": {"sample": 1.0, "file": str(file), "keep": 0}}
    async with router_before(pools(), policy=POLICY, router=router) as hub:
        for _ in range(5):
            await hub.post(TEXT)
        _, told = await get(hub, "/debug/decisions")
        assert told["decisions"] == []
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 5
    assert {line["outcome"]["outcome"] for line in lines} == {"ok"}
    assert all(line["outcome"]["node"] == line["node"] for line in lines)


async def test_decisions_are_counted(tmp_path):
    async with router_before(pools(), policy=POLICY) as hub:
        await hub.post({**TEXT, "priority": 1})
        await hub.post(TEXT)
        await hub.idle()
        name = 'pdhub_router_decisions_total{pool="general",reason="rule",rule="batch"}'
        assert await hub.metric(name) == 1
        assert await hub.metric("pdhub_router_decisions_total") == 2


async def test_nothing_is_shown_unless_debug_is_on(tmp_path):
    async with router_before(pools(), policy=POLICY, router={"debug_headers": False}) as hub:
        _, _, headers = await hub.post(TEXT)
        assert not [name for name in headers if name.lower().startswith("x-pdhub-")]
        assert (await explain(hub))[0] == 404
        assert (await get(hub, "/debug/decisions"))[0] == 404
        assert not list(hub.router.context.decisions.recent())


async def busy_world(hub, waiting=1):
    """The one place of pool `a` is taken, and some wait for it."""
    tasks = [asyncio.create_task(hub.post(TEXT)) for _ in range(1 + waiting)]
    for _ in range(200):
        if hub.router.context.gate.waiting()["a"] == waiting and len(hub.router.context.fleet.pools["a"].nodes) == 1:
            break
        await asyncio.sleep(0.02)
    return tasks


async def end(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


IN_ORDER = {"type": "slo", "rules": [{"name": "in-order", "pools": ["a", "b"], "fallback": []}]}


async def test_a_dry_run_knows_the_queue_and_where_it_would_spill(tmp_path):
    engines = {"a": [Engine(answer_never)], "b": [Engine(answer_json(ANSWER))]}
    async with router_before(engines, policy=IN_ORDER, options={"slots": 1}) as hub:
        tasks = await busy_world(hub)
        status, told = await explain(hub)
        assert (status, told["pool"], told["reason"]) == (200, "a", "rule")
        assert (told["door"]["pool"], told["door"]["ahead"], told["door"]["refused"]) == ("a", 1, "")
        now = hub.router.context.clock()
        for _ in range(5):
            seen = Sample("a", "a-0", now, prompt_tokens=3, ttft_ms=20.0, tpot_ms=100.0, output_tokens=100)
            hub.router.context.fleet.latency.observe(seen)
        await asyncio.sleep(0.1)
        _, told = await explain(hub, **{"x-slo-ttft-ms": "100"})
        assert (told["pool"], told["node"], told["reason"]) == ("b", "b-0", "spill")
        assert told["order"][0] == ["a", "a-0"]
        _, _, headers = await hub.post(TEXT, **{"x-slo-ttft-ms": "100"})
        assert (headers["x-pdhub-pool"], headers["x-pdhub-reason"]) == ("b", "spill")
        assert hub.router.context.gate.waiting()["a"] == 1
        await end(tasks)


async def test_a_dry_run_knows_who_would_be_turned_away(tmp_path):
    policy = {"type": "slo", "rules": [{"name": "only-a", "pools": ["a"], "fallback": []}]}
    engines = {"a": [Engine(answer_never)], "b": [Engine(answer_json(ANSWER))]}
    admission = {"queue_limit": 1}
    async with router_before(engines, policy=policy, options={"slots": 1}, admission=admission) as hub:
        tasks = await busy_world(hub)
        _, told = await explain(hub)
        assert (told["door"]["pool"], told["door"]["refused"]) == ("a", "the queue is full")
        _, told = await explain(hub, {**TEXT, "priority": 3})
        assert (told["pool"], told["reason"], told["door"]["pool"]) == (None, "shed", None)
        assert told["door"]["refused"] == "rejected-saturated"
        await end(tasks)
