"""Trees in which a vLLM prefill instance also, or only, serves nodes of `pdhub node`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from calls import get
from topology import CHOOSE, Ports
from world import Server, World

NODES = "nodes"
"""Name of the pool of `pdhub node`, and of its one node."""


@dataclass(frozen=True)
class Tree:
    """One tree.

    Args:
        kind: of :data:`kinds.KINDS`. pools: vLLM's own, beside ``nodes``.
        transport: as in `handoff.transport`. shared: vLLM's pool whose prefill instance serves the nodes too; None: the
            nodes have one of their own.
        chunk: tokens of one step of the prefill instance. full: only in the full run.
    """

    kind: str
    pools: tuple[str, ...]
    transport: dict[str, Any]
    shared: str | None = None
    chunk: int = 128
    full: bool = False


MOONCAKE = {"type": "mooncake", "config": {"protocol": "tcp"}}

TREES = {
    "mixed": Tree("tiny", ("pull", "whole"), {"type": "shm"}, shared="pull"),
    "tcp": Tree("tiny", ("whole",), {"type": "tcp"}, full=True),
    "nixl": Tree("tiny", ("whole",), {"type": "nixl"}, full=True),
    "mooncake": Tree("tiny", ("whole",), MOONCAKE, full=True),
    "latent": Tree("mla", ("whole",), {"type": "shm"}, chunk=2048),
    "latent-tcp": Tree("mla", ("whole",), {"type": "tcp"}, chunk=2048, full=True),
    "latent-nixl": Tree("mla", ("whole",), {"type": "nixl"}, chunk=2048, full=True),
    "latent-mooncake": Tree("mla", ("whole",), MOONCAKE, chunk=2048, full=True),
    "smol": Tree("smol", ("whole",), {"type": "shm"}, chunk=256, full=True),
    "smol-tcp": Tree("smol", ("whole",), {"type": "tcp"}, chunk=256, full=True),
    "smol-nixl": Tree("smol", ("whole",), {"type": "nixl"}, chunk=256, full=True),
    "smol-mooncake": Tree("smol", ("whole",), MOONCAKE, chunk=256, full=True),
}


class PDHubWorld(World):
    """A tree with the pool ``nodes``; ``servers`` are the vLLM servers."""

    @cached_property
    def servers(self) -> dict[str, Server]:
        foreign = [node["name"] for pool in self.data["pools"] if pool["name"] == NODES for node in pool["nodes"]]
        parts = [*self.data["prefill"], *(node for pool in self.data["pools"] for node in pool["nodes"])]
        return {part["name"]: Server(part["name"], part["port"], self) for part in parts if part["name"] not in foreign}

    @property
    def prefill(self) -> Server:
        """The instance that serves the nodes."""
        return next(self.servers[p["name"]] for p in self.data["prefill"] if NODES in p["pools"])

    @property
    def prefill_told(self) -> str:
        """Where that instance's connector tells its layout."""
        config = next(p["engine"]["config"] for p in self.data["prefill"] if NODES in p["pools"])
        return f"http://127.0.0.1:{config['pdhub_port']}/prefill"

    @property
    def node_url(self) -> str:
        port = next(pool["nodes"][0]["port"] for pool in self.data["pools"] if pool["name"] == NODES)
        return f"http://127.0.0.1:{port}"

    def node_load(self) -> dict[str, Any]:
        """What the node says of itself."""
        return json.loads(get(f"{self.node_url}/load")[1])


def with_nodes(tree: Tree, *, alone: bool = True) -> Callable[[dict[str, Any]], None]:
    """The change that puts the pool ``nodes`` into a configuration. ``alone``: keep the server that prefills itself."""

    def change(document: dict[str, Any]) -> None:
        ports = Ports()
        document["handoff"] = {"transport": tree.transport, "verify": True}
        whole = next(pool for pool in document["pools"] if pool["name"] == "whole")["engine"]["config"]
        if tree.shared is None:
            serve = json.loads(json.dumps(whole["serve"]))
            engine = {"type": "vllm", "config": {**whole, "handoff": "pdhub", "serve": serve}}
            instance = {"name": "prefill-nodes", "port": ports.take(), "threads": 1, "pools": [], "engine": engine}
            document["prefill"].append(instance)
            if tree.kind == "mla":
                serve["args"] += ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}']
        else:
            instance = next(p for p in document["prefill"] if tree.shared in p["pools"])
            instance["engine"] = json.loads(json.dumps(instance["engine"]))
        instance["pools"].append(NODES)
        config = instance["engine"]["config"]
        config["pdhub_port"] = ports.take()
        args = config["serve"]["args"]
        args[args.index("--max-num-batched-tokens") + 1] = str(tree.chunk)
        document["pools"].append(
            {
                "name": NODES,
                "engine": {"type": "transformers", "config": {"slots": 8, "max_context": whole["max_context"]}},
                "nodes": [{"name": NODES, "port": ports.take(), "threads": 1}],
            }
        )
        rule = {"name": NODES, "match": {"headers": {CHOOSE: NODES}}, "pools": [NODES], "fallback": []}
        document["policy"]["rules"].append(rule)
        if not alone:
            document["pools"] = [pool for pool in document["pools"] if pool["name"] != "whole"]
            document["policy"]["rules"] = [rule for rule in document["policy"]["rules"] if rule["name"] != "whole"]

    return change
