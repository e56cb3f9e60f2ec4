"""The configuration of a tree: what a user would write, with ports that are free now."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from kinds import HANDOFFS, SERVER_ARGS, SERVER_ENV, Kind

SHIMS = Path(__file__).parent / "shims"
CHOOSE = "x-pool"
"""Header by which a test says which pool is to answer."""


RECYCLE = {"when": "always", "above": 0, "after_s": 5}
"""Pools have one node, a few blocks are a small share, and a start takes up to 40 s on two cores."""


class Ports:
    """Free ports below the range of outgoing connections, each given once in this process."""

    _given: ClassVar[set[int]] = set()

    def take(self, count: int = 1) -> int:
        """The first of ``count`` consecutive free ports."""
        while True:
            first = random.SystemRandom().randrange(20_000, 32_000)
            ports = set(range(first, first + count))
            if not ports & self._given and all(map(_free, ports)):
                self._given |= ports
                return first


def _free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def topology(kind: Kind, pools: Sequence[str], model: Path, vllm: Path) -> dict[str, Any]:
    """One router; each pool has one node of its name and, if it needs one, its own prefill instance ``prefill-POOL``.

    Args:
        pools: of the kind's. vllm: the `vllm` command. model: the directory that all servers load.
    """
    ports = Ports()
    document: dict[str, Any] = {
        "version": 1,
        "model": {"name": "m", "path": str(model)},
        "router": {"port": ports.take(), "debug_headers": True, "recycle": RECYCLE},
        "prefill": [],
        "pools": [],
        "policy": {"type": "round_robin", "rules": [_chosen(pool) for pool in pools]},
    }
    for pool in pools:
        engine = _engine(kind, HANDOFFS[pool], vllm, ports)
        if engine["config"]["handoff"] != "none":
            instance = {
                "name": f"prefill-{pool}",
                "port": ports.take(),
                "threads": 1,
                "pools": [pool],
                "engine": engine,
            }
            if kind.watched:
                instance["engine"] = _watched(engine, instance["name"], ports)
            document["prefill"].append(instance)
        node = {"name": pool, "port": ports.take(), "threads": 1}
        if engine["config"]["handoff"] != "none":
            engine = _refusing(engine)
        document["pools"].append({"name": pool, "engine": engine, "nodes": [node]})
    return document


def _refusing(engine: dict[str, Any]) -> dict[str, Any]:
    """Can be told to refuse requests (``shims/refuse.py``)."""
    serve = engine["config"]["serve"]
    serve = {**serve, "args": [*serve["args"], "--middleware", "refuse.Refuse"]}
    return {**engine, "config": {**engine["config"], "serve": serve}}


def _watched(engine: dict[str, Any], name: str, ports: Ports) -> dict[str, Any]:
    """Publishes what its cache holds, and tells its load in headers."""
    first = ports.take(2)
    events = {"endpoint": f"tcp://127.0.0.1:{first}", "replay": f"tcp://127.0.0.1:{first + 1}"}
    return {**engine, "config": {**engine["config"], "kv_events": {name: events}, "orca": True}}


def _chosen(pool: str) -> dict[str, Any]:
    return {"name": pool, "match": {"headers": {CHOOSE: pool}}, "pools": [pool], "fallback": []}


def _engine(kind: Kind, handoff: str, vllm: Path, ports: Ports) -> dict[str, Any]:
    serve: dict[str, Any] = {
        "command": [str(vllm), "serve"],
        "env": {**SERVER_ENV, "PYTHONPATH": str(SHIMS)},
        "args": [
            *SERVER_ARGS,
            "--max-num-batched-tokens", str(kind.chunk),
            "--kv-cache-memory-bytes", kind.kv,
            *kind.args,
            *(kind.split_args if handoff != "none" else ()),
        ],
        "ready_within_s": 600,
    }  # fmt: skip
    config: dict[str, Any] = {"handoff": handoff, "slots": 8, "max_context": kind.context, "serve": serve}
    if handoff in ("nixl", "nixl_push"):
        config["side_channel_port"] = ports.take(2)  # the instance's, then the node's
        serve["kv_buffer_device"] = "cpu"
    if handoff == "nixl_push" and kind.told:
        config["engine_id"] = "prefill-push"
    if handoff == "mooncake":
        config["bootstrap_port"] = ports.take()
        serve |= {"connector": "MooncakeCpuConnector", "connector_module": "mooncake_cpu", "mooncake_protocol": "tcp"}
    return {"type": "vllm", "config": config}
