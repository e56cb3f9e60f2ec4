"""The ``policy`` section at work in a running router: who is believed, which rule counts, what the answer says."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from pdhub.testing.hub import Hub, Reply, toy_topology

pytestmark = pytest.mark.integration

CONFIG = {"slots": 4}
KEY = "sk-gold"
THRESHOLD = {"tpot_below_ms": 20, "fast": "fast", "otherwise": "general"}


async def start(hub: Any, **policy: Any) -> Hub:
    topology = toy_topology(fast=CONFIG, general=CONFIG, prefill=CONFIG)
    topology["policy"] = {"type": "slo_threshold", "config": THRESHOLD, **policy}
    running: Hub = await hub.start(topology)
    return running


async def ask(running: Hub, headers: dict[str, str] | None = None, **members: Any) -> Reply:
    body = {"model": "toy", "prompt": "hello", "max_tokens": 4, **members}
    return await running.post("/v1/completions", body, headers)


def pool(reply: Reply) -> str:
    assert reply.status == 200, reply.body
    return reply.headers["x-pdhub-pool"]


async def metric(running: Hub, start: str) -> float:
    async with running.http.get(f"{running.url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))


async def test_classes_tenants_and_rules(hub: Any) -> None:
    running = await start(
        hub,
        slo_classes={
            "interactive": {"tpot_ms": 10, "service_tier": "priority"},
            "batch": {"service_tier": "flex"},
        },
        tenants={
            "gold": {"api_key_sha256": [sha256(KEY.encode()).hexdigest()], "default_class": "interactive"},
            "open": {"max_class": "interactive"},
            "anonymous": {"trust": "strip"},
        },
        default_tenant="anonymous",
        rules=[
            {"name": "beta", "match": {"headers": {"X-Beta": "y*"}, "tenant": ["open"]}, "pools": ["fast"]},
        ],
    )
    key = {"authorization": f"Bearer {KEY}"}
    assert pool(await ask(running, key)) == "fast", "the tenant's default class"
    assert pool(await ask(running, {**key, "x-slo-tpot-ms": "500"})) == "general"
    assert pool(await ask(running, {"x-slo-tpot-ms": "5"})) == "general", "nobody believes an anonymous client"
    named = {"x-llm-d-inference-fairness-id": "open"}
    assert pool(await ask(running, {**named, "x-pdhub-slo-class": "interactive"})) == "fast"
    assert pool(await ask(running, named)) == "general"
    beta = await ask(running, {**named, "x-beta": "yes"})
    assert (pool(beta), beta.headers["x-pdhub-reason"]) == ("fast", "rule")
    assert pool(await ask(running, {"x-beta": "yes"})) == "general"


async def test_the_answer_says_the_tier_that_served(hub: Any) -> None:
    running = await start(
        hub,
        slo_classes={"quick": {"tpot_ms": 10, "service_tier": "priority"}},
        tenants={"all": {}, "anonymous": {"trust": "strip"}},
        default_tenant="anonymous",
    )
    trusted = {"x-llm-d-inference-fairness-id": "all"}
    reply = await ask(running, trusted, service_tier="priority")
    assert (pool(reply), reply.json["service_tier"]) == ("fast", "priority")
    assert (await ask(running, trusted, service_tier="auto")).json["service_tier"] == "default"
    assert (await ask(running, trusted, service_tier="flex")).json["service_tier"] == "flex"
    assert "service_tier" not in (await ask(running, trusted)).json
    stripped = await ask(running, service_tier="priority")
    assert (pool(stripped), stripped.json["service_tier"]) == ("general", "default")
    chat = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
    stream = await running.post("/v1/chat/completions", {**chat, "service_tier": "priority"}, trusted)
    assert stream.done
    assert {event["service_tier"] for event in stream.events} == {"priority"}


async def test_what_cannot_be_read_is_counted_and_refused_only_if_strict(hub: Any) -> None:
    lenient = await start(hub)
    assert pool(await ask(lenient, {"x-llm-d-slo-tpot-ms": "soon", "x-slo-tpot-ms": "5"})) == "general"
    assert await metric(lenient, 'pdhub_router_slo_invalid_total{name="x-llm-d-slo-tpot-ms"}') == 1
    strict = await start(hub, strict=True)
    for headers, members, param in (
        ({"x-slo-tpot-ms": "NaN"}, {}, "x-slo-tpot-ms"),
        ({"x-pdhub-slo-class": "none"}, {}, "x-pdhub-slo-class"),
        ({}, {"extra_args": {"itl_target": -1}}, "extra_args.itl_target"),
        ({}, {"service_tier": "platinum"}, "service_tier"),
    ):
        reply = await ask(strict, headers, **members)
        assert reply.status == 400
        assert reply.error is not None
        assert reply.error["param"] == param
    assert pool(await ask(strict, {"x-slo-tpot-ms": "5"})) == "fast"


async def test_a_policy_that_leaves_nobody_is_a_503_and_a_shadow_costs_nothing(hub: Any) -> None:
    running = await start(
        hub,
        filters=[{"type": "label", "config": {"match": {"zone": "moon"}}, "soft": True}],
        rules=[
            {
                "name": "moon",
                "match": {"headers": {"x-zone": "moon"}},
                "filters": [{"type": "label", "config": {"match": {"zone": "moon"}}}],
            }
        ],
        shadow={"type": "slo_threshold", "config": {**THRESHOLD, "tpot_below_ms": 1000}},
    )
    assert pool(await ask(running)) == "general"
    assert pool(await ask(running, {"x-slo-tpot-ms": "500"})) == "general"
    refused = await ask(running, {"x-zone": "moon"})
    assert refused.status == 503
    assert refused.error is not None
    assert "policy" in refused.error["message"]
    assert await metric(running, 'pdhub_router_shadow_total{agrees="none",pool="fast"}') == 1
    assert await metric(running, 'pdhub_router_shadow_total{agrees="node",pool="general"}') == 1
