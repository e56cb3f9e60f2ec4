"""Deployment side of nodes that `pdhub node` hosts: what they need of a prefill instance, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pdhub.api import Finding, NodeSpec, Operate, Severity, Topology
from pdhub_tilert.config import TileRTNodeConfig
from pdhub_tilert.operate_prefill import arguments

ENGINE: Final = "tilert-node"


class TileRTNodeOperate(Operate):
    """See :class:`pdhub.api.Operate`. ``pdhub node`` starts the nodes, with `python` and `ready_within_s` of the pool.

    They are filled by pdhub's own connector; :meth:`prefill_child` only says in which form.
    """

    def __init__(self, config: TileRTNodeConfig) -> None:
        self._config = config

    def prefill_child(self, node: NodeSpec, topology: Topology) -> Mapping[str, Any]:
        return {"kv_connector_extra_config": {"form": "planes", "shards": self._config.shards}}

    def refusals(self, topology: Topology) -> Sequence[Finding]:
        return tuple(refusals(topology))

    def checks(self, topology: Topology) -> Sequence[Finding]:
        from pdhub_tilert.operate_checks import hosted

        return tuple(hosted(self._config, topology))


def ours(topology: Topology) -> list[tuple[NodeSpec, TileRTNodeConfig]]:
    """Hosted nodes of the topology."""
    nodes = [node for node in topology.nodes if node.engine == ENGINE]
    return [(node, TileRTNodeConfig.model_validate(dict(node.config))) for node in nodes]


def refusals(topology: Topology) -> Iterator[Finding]:
    """Findings over all hosted nodes and the prefill instances that serve them."""
    pools = {node.pool: (node, config) for node, config in ours(topology)}
    for pool, (node, config) in pools.items():
        where = f"pool '{pool}'"
        if topology.model_path is None:
            yield Finding(Severity.ERROR, where, "its nodes read the model's config.json", "set model.path")
        if config.engine == "tilert" and config.weights_dir is None:
            severity = Severity.ERROR if node.launch else Severity.WARNING
            yield Finding(severity, where, "TileRT needs its converted weights", "set weights_dir; `stub` needs none")
        for prefill in topology.prefills_of(pool or ""):
            if prefill.engine == "vllm":
                yield from _prefill(prefill, config)


def _prefill(prefill: NodeSpec, config: TileRTNodeConfig) -> Iterator[Finding]:
    yield from arguments(prefill, config)
    ranks = prefill.config.get("tensor_parallel") or 1
    if ranks % config.shards:
        message = f"its {ranks} workers cannot write {config.shards} shards"
        fix = "`shards` of its TileRT pools divides its `tensor_parallel`"
        yield Finding(Severity.ERROR, f"prefill '{prefill.name}'", message, fix)
