"""A dry run where KV is handed over: which instance would compute the prompt, and when the node is settled."""

from __future__ import annotations

import pytest

from pdhub.testing.hub import MODEL, HubFactory, toy_topology

pytestmark = pytest.mark.integration


async def test_the_prefill_instance_is_part_of_the_answer(hub: HubFactory) -> None:
    running = await hub.start(toy_topology(prefills=2, general={"slots": 4}))
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
    told = (await running.post("/explain", body, {"x-slo-tpot-ms": "5"})).json
    assert (told["pool"], told["node"]) == ("fast", "fast-0")
    assert told["handoff"]["bind"] == "early"
    assert told["handoff"]["prefill"] in ("prefill-0", "prefill-1")
    for node in running.nodes:
        assert (await running.load(node)).get("leases") in ({}, None)
    reply = await running.post("/v1/completions", body, {"x-slo-tpot-ms": "5"})
    assert reply.headers["x-pdhub-node"] == told["node"]


async def test_a_pair_that_does_not_fit_is_told(hub: HubFactory) -> None:
    topology = toy_topology(fast={"layers": 3}, general={"slots": 4})
    running = await hub.start(topology)
    told = (await running.post("/explain", {"model": MODEL, "prompt": "hello"}, {"x-slo-tpot-ms": "5"})).json
    assert told["pool"] == "fast"
    assert told["handoff"]["prefill"] is None
    assert "KV layout" in told["handoff"]["reason"]
