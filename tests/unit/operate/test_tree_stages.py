"""Which processes a configuration starts: order, commands, ready URLs, and what an engine plugin may replace."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdhub.api import ConfigError, EngineSpec, NoConfig, NodeSpec, Operate, Process, Topology, TransportSpec
from pdhub.config.build import Resolved
from pdhub.config.models import Config
from pdhub.operate.tree import reachable, router_url, stages, topology
from pdhub.testing.memory import MemoryTransport


class Own(Operate):
    def process(self, node: NodeSpec, topology: Topology) -> Process | None:
        if node.name != "f0":
            return None
        return Process(argv=("serve", topology.model, node.url), ready_url=f"{node.url}/live")


def plan(path: Path | None = Path("hub.yaml")) -> SimpleNamespace:
    config = Config.model_validate(
        {
            "model": {"name": "m", "path": "/models/m"},
            "router": {"host": "0.0.0.0", "port": 8000},
            "prefill": [{"name": "p0", "port": 8001, "engine": {"type": "toy"}}],
            "pools": [
                {
                    "name": "fast",
                    "engine": {"type": "own"},
                    "nodes": [{"name": "f0", "port": 8002}, {"name": "f1", "port": 8003}],
                },
                {"name": "slow", "engine": {"type": "toy"}, "nodes": [{"name": "s0", "port": 8004, "launch": False}]},
            ],
            "policy": {"type": "x"},
        }
    )
    toy = Resolved(EngineSpec(name="toy", summary=""), NoConfig())
    own = Resolved(EngineSpec(name="own", summary="", operate=lambda _: Own()), NoConfig())
    transport = Resolved(TransportSpec(name="shm", summary="", factory=lambda _: MemoryTransport()), NoConfig())
    pools = {"fast": own, "slow": toy}
    return SimpleNamespace(config=config, path=path, pools=pools, prefill={"p0": toy}, transport=transport)


def test_nodes_come_before_the_router_and_prefill_comes_first() -> None:
    nodes, routers = stages(plan())
    assert [member.name for member in nodes] == ["p0", "f0", "f1"]
    assert [(member.name, member.vital) for member in routers] == [("router", True)]


def test_commands_carry_the_overrides() -> None:
    nodes, routers = stages(plan(), ["router.port=9", "a.b=c"])
    words = ("--set", "router.port=9", "--set", "a.b=c")
    assert nodes[0].process.argv == (sys.executable, "-m", "pdhub", "node", "hub.yaml", "p0", *words)
    assert routers[0].process.argv == (sys.executable, "-m", "pdhub", "router", "hub.yaml", *words)
    assert nodes[0].process.ready_url == "http://127.0.0.1:8001/health"
    assert routers[0].process.ready_url == "http://127.0.0.1:8000/ready"


def test_a_node_gets_the_time_that_it_may_drain() -> None:
    nodes, _ = stages(plan())
    assert nodes[0].stop_within_s > 30.0  # the default of drain_s


def test_an_engine_may_bring_its_own_process_or_leave_it_to_the_host() -> None:
    nodes, _ = stages(plan())
    assert nodes[1].process.argv == ("serve", "m", "http://127.0.0.1:8002")
    assert nodes[1].process.ready_url == "http://127.0.0.1:8002/live"
    assert nodes[2].process.argv[3:6] == ("node", "hub.yaml", "f1")


def test_the_topology_lists_nodes_that_run_elsewhere_too() -> None:
    seen = topology(plan())
    assert [(node.name, node.role, node.pool) for node in seen.nodes] == [
        ("p0", "prefill", None),
        ("f0", "decode", "fast"),
        ("f1", "decode", "fast"),
        ("s0", "decode", "slow"),
    ]
    assert (seen.model, seen.model_path, seen.transport) == ("m", "/models/m", "shm")


def test_a_plan_without_a_file_cannot_be_started() -> None:
    with pytest.raises(ConfigError, match="from a configuration file"):
        stages(plan(path=None))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("10.0.0.7", "http://10.0.0.7:80"),
        ("node-a", "http://node-a:80"),
    ],
)
def test_reachable(host: str, url: str) -> None:
    assert reachable(host, 80) == url


def test_router_url() -> None:
    assert router_url(plan()) == "http://127.0.0.1:8000"
