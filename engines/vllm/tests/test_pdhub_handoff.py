"""pdhub's own connector in a vLLM prefill instance: how it is composed, asked, and refused."""

from __future__ import annotations

from typing import Any

import pytest
from pdhub_vllm.client import client_of
from pdhub_vllm.config import VLLMConfig
from pdhub_vllm.operate_refusals import refusals
from test_operate_serve import node, started, topology, transfer

from pdhub.api import Capabilities, Target

CHILD = {
    "kv_connector": "PDHubConnector",
    "kv_connector_module_path": "pdhub.connector.vllm",
    "kv_connector_extra_config": {"transport": "shm", "block_tokens": 16},
}


def target(role: str = "prefill", info: dict[str, Any] | None = None) -> Target:
    return Target("p", "http://10.0.0.7:8100", info or {}, {}, {}, role)


def test_an_instance_for_nodes_alone_has_the_one_connector() -> None:
    whole = topology(node("p", 8100, "prefill", handoff="pdhub"), serves={"p": []}, foreign=[CHILD])
    assert list(refusals(whole)) == []
    flags, env = started(whole, "p")
    made = transfer(flags)
    assert made["kv_connector"] == "PDHubConnector"
    assert made["kv_role"] == "kv_producer"
    assert made["kv_connector_extra_config"] == {
        "transport": "shm", "block_tokens": 16, "host": "127.0.0.1", "port": 5580,
    }  # fmt: skip
    assert not env


def test_beside_vllms_own_it_needs_a_port() -> None:
    pool = node("d", 8200, pool="x")
    without = topology(node("p", 8100, "prefill"), pool, serves={"p": ["x"]}, foreign=[CHILD])
    (finding,) = refusals(without)
    assert "names no port" in finding.message
    whole = topology(node("p", 8100, "prefill", pdhub_port=5999), pool, serves={"p": ["x"]}, foreign=[CHILD])
    assert list(refusals(whole)) == []
    made = transfer(started(whole, "p")[0])
    stock, ours = made["kv_connector_extra_config"]["connectors"]
    assert (stock["kv_connector"], ours["kv_connector"]) == ("NixlConnector", "PDHubConnector")
    assert ours["kv_connector_extra_config"]["port"] == 5999


def test_what_cannot_work() -> None:
    other = {**CHILD, "kv_connector_extra_config": {"block_tokens": 32}}
    two = topology(node("p", 8100, "prefill", handoff="pdhub"), serves={"p": []}, foreign=[CHILD, other])
    assert ["blocks of different sizes" in f.message for f in refusals(two)] == [True]
    pool = topology(node("d", 8200, pool="x", handoff="pdhub"), serves={})
    assert ["take no KV from pdhub's connector" in f.message for f in refusals(pool)] == [True]
    same = topology(
        node("p", 8100, "prefill", handoff="pdhub"),
        node("q", 8101, "prefill", handoff="pdhub"),
        serves={"p": [], "q": []},
        foreign=[CHILD],
    )
    assert ["port 5580 of 127.0.0.1 is also that of 'p'" in f.message for f in refusals(same)] == [True]


@pytest.mark.parametrize(
    ("options", "port"), [({"handoff": "pdhub"}, 5580), ({"pdhub_port": 7}, 7), ({}, None)], ids=str
)
def test_the_connector_is_asked_with_every_probe(options: dict[str, Any], port: int | None) -> None:
    client = client_of(VLLMConfig.model_validate(options))
    asked = client.details(target())
    if port is None:
        assert asked == {}
    else:
        assert (asked["pdhub"].path, asked["pdhub"].origin) == ("/prefill", f"http://10.0.0.7:{port}")
    assert client.details(target("decode")) == {}


def test_what_it_writes_is_what_its_connector_says() -> None:
    told = {"data": [{"id": "m", "max_model_len": 50}], "pdhub": {"fingerprint": "abc"}}
    alone = client_of(VLLMConfig.model_validate({"handoff": "pdhub"}))
    both = client_of(VLLMConfig.model_validate({"pdhub_port": 7}))
    assert alone.writes(target(info=told)) == {"abc"}
    assert both.writes(target(info=told)) == {"abc", "vllm:nixl"}
    assert alone.writes(target()) == frozenset()
    known = alone.capabilities(told)
    assert isinstance(known, Capabilities)
    assert known.max_context == 50
