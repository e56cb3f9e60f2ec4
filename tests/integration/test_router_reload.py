"""Policy and admission change while requests run; nothing else does, and nothing wrong ever does."""

import asyncio
import json
import os
from contextlib import asynccontextmanager

import aiohttp
import pytest
import yaml
from router_fakes import TEXT, Engine, Running, answer_json

from pdhub import registry
from pdhub.config.build import load_plan
from pdhub.router.reload import Result
from pdhub.router.server import RouterServer

pytestmark = pytest.mark.integration

OVERRIDES = ("router.port=0",)


def prefer(pool, **more):
    return {"type": "slo", "rules": [{"name": f"to-{pool}", "pools": [pool]}], **more}


class World(Running):
    """A router that was started from a file, in front of two engines."""

    def __init__(self, router, http, path, data, engines):
        super().__init__(router, http)
        self.path, self.data, self.engines = path, data, engines

    def write(self, text=None, **sections):
        """As `mv` does: never half a file."""
        new = self.path.with_suffix(".new")
        new.write_text(text if text is not None else yaml.safe_dump({**self.data, **sections}))
        os.replace(new, self.path)

    async def reload(self, text=None, **sections):
        self.write(text, **sections)
        return await self.router.reloader.reload()

    async def pool(self):
        status, _, headers = await self.post(TEXT)
        assert status == 200
        return headers["x-pdhub-pool"]

    async def ready(self):
        async with self.http.get(self.url + "/ready") as reply:
            assert reply.status == 200
            return (await reply.json())["policy"]

    async def metrics(self):
        async with self.http.get(self.url + "/metrics") as reply:
            return await reply.text()


@asynccontextmanager
async def world(tmp_path, policy, *, interval=0.0, answer=None, **sections):
    text = {"object": "text_completion", "choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
    engines = {name: await Engine(answer or answer_json(text)).start() for name in ("a", "b")}
    data = {
        "model": {"name": "m"},
        "router": {"port": 8000, "debug_headers": True, "probe_interval_s": 0.2, "reload_interval_s": interval},
        "pools": [
            {
                "name": name,
                "engine": {"type": "openai"},
                "nodes": [{"name": f"{name}-0", "port": engine.port, "launch": False}],
            }
            for name, engine in engines.items()
        ],
        "policy": policy,
        **sections,
    }
    path = tmp_path / "router.yaml"
    path.write_text(yaml.safe_dump(data))
    loaded = registry.load()

    def load():
        return load_plan(path, registry=loaded, overrides=OVERRIDES)

    server = RouterServer(load(), load)
    await server.start()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
        here = World(server, http, path, data, engines)
        try:
            for _ in range(300):
                async with http.get(server.url + "/ready") as reply:
                    if not (await reply.json())["problems"]:
                        break
                await asyncio.sleep(0.02)
            yield here
        finally:
            await server.close()
            for engine in engines.values():
                await engine.close()


async def until(check, limit_s=5.0):
    for _ in range(int(limit_s / 0.02)):
        if await check():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen")


async def test_a_changed_file_is_live_without_a_restart(tmp_path):
    async with world(tmp_path, prefer("a"), interval=0.05) as here:
        assert await here.pool() == "a"
        before = await here.ready()
        here.write(policy=prefer("b"))

        async def moved():
            return await here.pool() == "b"

        await until(moved)
        after = await here.ready()
        assert after["version"] != before["version"]
        assert after["reload"]["result"] == "applied"
        text = await here.metrics()
        assert f'pdhub_router_policy_info{{policy="slo",version="{after["version"]}"}} 1.0' in text
        assert before["version"] not in text
        assert 'pdhub_router_reloads_total{result="applied"} 1.0' in text
        assert "pdhub_router_reload_failing 0.0" in text


async def test_a_file_that_is_still_being_written_is_not_read(tmp_path):
    async with world(tmp_path, prefer("a"), interval=0.2) as here:
        whole = yaml.safe_dump({**here.data, "policy": prefer("b")})
        for cut in (200, 400, 600):  # each look finds other content than the last
            here.path.write_text(whole[:cut])
            await asyncio.sleep(0.1)
        here.path.write_text(whole)

        async def moved():
            return await here.pool() == "b"

        await until(moved)
        assert 'pdhub_router_reloads_total{result="invalid"}' not in await here.metrics()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("policy: [", "not valid YAML"),
        ("", "the file is empty"),
        ("policy: {type: slo}\n", "this key is required"),
    ],
)
async def test_a_file_that_is_wrong_changes_nothing_and_is_reported(tmp_path, text, problem, caplog):
    async with world(tmp_path, prefer("a")) as here:
        before = await here.ready()
        found = await here.reload(text)
        assert found.result is Result.INVALID
        assert problem in found.problem
        now = await here.ready()
        assert now["version"] == before["version"]
        assert problem in now["reload"]["problem"]
        assert problem in caplog.text
        assert await here.metric("pdhub_router_reload_failing") == 1
        assert await here.pool() == "a"
        assert (await here.reload()).result is Result.UNCHANGED
        assert await here.metric("pdhub_router_reload_failing") == 0


@pytest.mark.parametrize(
    "policy",
    [
        {"type": "no-such"},
        {"type": "slo", "config": {"margin": 7}},
        {"type": "slo", "rules": [{"name": "r", "pools": ["nowhere"]}]},
        {"type": "slo", "default_class": "nowhere"},
        {"type": "slo", "slo_classes": {"x": {"tpot_ms": -1}}},
        {"type": "slo", "scorers": [{"type": "no-such"}]},
        {"type": "slo", "shadow": {"type": "no-such"}},
    ],
    ids=lambda policy: json.dumps(policy)[:40],
)
async def test_a_policy_that_is_wrong_anywhere_is_wrong_as_a_whole(tmp_path, policy):
    async with world(tmp_path, prefer("a")) as here:
        assert (await here.reload(policy=policy)).result is Result.INVALID
        assert await here.pool() == "a"


async def test_a_missing_file_changes_nothing(tmp_path):
    async with world(tmp_path, prefer("a"), interval=0.05) as here:
        here.path.unlink()

        async def noticed():
            return await here.metric("pdhub_router_reload_failing") == 1

        await until(noticed)
        assert await here.pool() == "a"
        here.write(policy=prefer("b"))

        async def moved():
            return await here.pool() == "b"

        await until(moved)
        assert await here.metric("pdhub_router_reload_failing") == 0


async def test_what_needs_a_restart_is_refused_and_named(tmp_path, caplog):
    async with world(tmp_path, prefer("a")) as here:
        pools = [{**here.data["pools"][0], "cost": 9.0}, here.data["pools"][1]]
        found = await here.reload(policy=prefer("b"), pools=pools)
        assert found.result is Result.REFUSED
        assert found.problem == "a change of pools[0].cost needs a restart"
        assert "restart the router" in caplog.text
        assert await here.pool() == "a"
        listen = {**here.data["router"], "host": "127.0.0.2"}
        assert (await here.reload(router=listen)).problem == "a change of router.host needs a restart"


async def test_flags_still_win_over_the_file(tmp_path):
    async with world(tmp_path, prefer("a")) as here:
        port = {**here.data["router"], "port": 9999}
        assert (await here.reload(policy=prefer("b"), router=port)).result is Result.APPLIED


async def test_only_content_makes_a_new_version(tmp_path):
    async with world(tmp_path, prefer("a")) as here:
        live = here.router.context.rules
        found = await here.reload("# a comment\n" + yaml.safe_dump(here.data, sort_keys=True, indent=8))
        assert found.result is Result.UNCHANGED
        assert here.router.context.rules is live


async def test_requests_keep_the_policy_that_they_started_with(tmp_path):
    go, failed = asyncio.Event(), asyncio.Event()

    async def once(request):
        if not failed.is_set():
            failed.set()
            await go.wait()
            return aiohttp.web.json_response({"error": {"message": "gone"}}, status=500)
        return await answer_json({"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]})(request)

    rules = [{"name": "in-order", "pools": ["a", "b"], "fallback": []}]
    async with world(tmp_path, {"type": "slo", "rules": rules}, answer=once) as here:
        old = (await here.ready())["version"]
        slow = asyncio.create_task(here.post(TEXT))
        await failed.wait()
        only_a = [{"name": "only-a", "pools": ["a"], "fallback": []}]
        assert (await here.reload(policy={"type": "slo", "rules": only_a})).result is Result.APPLIED
        go.set()
        status, _, headers = await slow
        assert (status, headers["x-pdhub-pool"], headers["x-pdhub-rule"]) == (200, "b", "in-order")
        assert headers["x-pdhub-policy-version"] == old
        status, _, headers = await here.post(TEXT)
        assert (status, headers["x-pdhub-rule"]) == (200, "only-a")


async def test_classes_and_admission_reload_too(tmp_path):
    async with world(tmp_path, prefer("a")) as here:
        status, body, _ = await here.post(TEXT, **{"x-slo-tpot-ms": "soon"})
        assert status == 200
        await here.reload(policy=prefer("a", strict=True), admission={"queue_limit": 3, "default_budget_s": 7})
        status, body, _ = await here.post(TEXT, **{"x-slo-tpot-ms": "soon"})
        assert status == 400
        assert json.loads(body)["error"]["param"] == "x-slo-tpot-ms"
        assert here.router.context.rules.admission.default_budget_s == 7


async def test_reloads_under_load_lose_and_mix_nothing(tmp_path):
    """Every answer comes from the pool that its own version of the policy names."""
    async with world(tmp_path, prefer("a")) as here:
        pools = {here.router.context.rules.version: "a"}
        stop = asyncio.Event()

        async def client():
            answers = []
            while not stop.is_set():
                status, _, headers = await here.post(TEXT)
                answers.append((status, headers["x-pdhub-policy-version"], headers["x-pdhub-pool"]))
            return answers

        clients = [asyncio.create_task(client()) for _ in range(8)]
        for turn in range(12):
            pool = "ba"[turn % 2]
            here.write(policy=prefer(pool))
            results = await asyncio.gather(*(here.router.reloader.reload() for _ in range(3)))
            assert [r.result for r in results] == [Result.APPLIED, Result.UNCHANGED, Result.UNCHANGED]
            pools[here.router.context.rules.version] = pool
        stop.set()
        answers = [answer for each in await asyncio.gather(*clients) for answer in each]
        assert len(answers) > 50
        assert len(pools) == 2
        assert all(status == 200 and pools[version] == pool for status, version, pool in answers)
        assert {pool for _, _, pool in answers} == {"a", "b"}
        await here.idle()


async def test_a_router_without_a_file_says_so(tmp_path):
    async with world(tmp_path, prefer("a")) as here:
        here.router.reloader._load = None
        assert (await here.router.reloader.reload()).result is Result.REFUSED


async def test_what_was_learned_survives_a_reload(tmp_path):
    affinity = {"type": "prefix_affinity", "config": {"entries": 100}}
    policy = {"type": "slo", "scorers": [affinity], "rules": [{"name": "all", "pools": ["a", "b"]}]}
    async with world(tmp_path, policy) as here:
        long = {**TEXT, "prompt": "the same beginning " * 200}
        await here.post(long)

        async def share():
            async with here.http.post(here.url + "/explain", json=long) as reply:
                rows = (await reply.json())["candidates"]
            return max(row["scores"].get("prefix_affinity", 0) for row in rows)

        before = await share()
        assert before > 0.5
        more = {
            **policy,
            "scorers": [{**affinity, "weight": 3}, {"type": "load"}],
            "slo_classes": {"x": {"tpot_ms": 9}},
        }
        assert (await here.reload(policy=more)).result is Result.APPLIED
        assert await share() == before
        other = {**affinity, "config": {"entries": 50}}
        assert (await here.reload(policy={**policy, "scorers": [other]})).result is Result.APPLIED
        assert await share() == 0
