"""What cannot work, as far as the configuration alone tells."""

from __future__ import annotations

from collections.abc import Iterator

from pdhub.api import Finding, NodeSpec, Severity, Topology
from pdhub_tilert.client import control_of
from pdhub_tilert.config import TileRTConfig
from pdhub_tilert.operate_prefill import arguments, environment_of, severity_of
from pdhub_tilert.operate_serve import CONNECTOR, ours, senders, shards


def refusals(topology: Topology) -> Iterator[Finding]:
    """Findings over all decode servers and the prefill instances that serve them."""
    seen: set[str] = set()
    for node, config in ours(topology):
        assert node.pool is not None
        if node.pool not in seen:
            seen.add(node.pool)
            yield from _transport(node.pool, config)
            yield from _prefills(node.pool, config, topology)
    for node in topology.nodes:
        if node.role == "prefill":
            yield from _instance(node)
    yield from _ports(topology)


def _transport(pool: str, config: TileRTConfig) -> Iterator[Finding]:
    if config.transport == "nixl" and (shards(config) > 1 or senders(config) > 1):
        message = "TileRT's NIXL transport knows one device: with more shards or senders it writes to the wrong one"
        yield _error(f"pool '{pool}'", message, "set serve.shards and serve.senders to 1, or transport to mooncake")


def _prefills(pool: str, config: TileRTConfig, topology: Topology) -> Iterator[Finding]:
    for prefill in topology.prefills_of(pool):
        if prefill.engine != "vllm":
            fix = "name the pools that the instance serves in its `pools`"
            message = f"prefill instance '{prefill.name}' is no vLLM server ({prefill.engine})"
            yield _error(f"pool '{pool}'", message, fix)
            continue
        yield from _server(prefill, config)


def _server(prefill: NodeSpec, config: TileRTConfig) -> Iterator[Finding]:
    """Its arguments and environment."""
    yield from arguments(prefill, config)
    told = str(environment_of(prefill).get("TILERT_PD_SENDERS", "8"))
    if told != str(senders(config)):
        message = f"TILERT_PD_SENDERS is {told} at prefill and {senders(config)} at its nodes: every hello is refused"
        fix = f"put `TILERT_PD_SENDERS: '{senders(config)}'` into serve.env"
        yield Finding(severity_of(prefill), f"prefill '{prefill.name}'", message, fix)


def _instance(node: NodeSpec) -> Iterator[Finding]:
    wanted = [child for child in node.children if child.get("kv_connector") == CONNECTOR]
    if len(wanted) > 1:
        message = "its TileRT pools differ in profile, max_seq_len or transport, and one connector claims for all"
        yield _error(f"prefill '{node.name}'", message, "give each such pool its own prefill instance (`pools`)")


def _ports(topology: Topology) -> Iterator[Finding]:
    """Control ports against all ports of their machine."""
    taken = {(node.host, node.port): node.name for node in topology.nodes if node.port}
    for node, config in ours(topology):
        _, port = control_of(config, node.url)
        other = taken.setdefault((node.host, port), node.name)
        if other != node.name:
            fix = "leave `ctrl_port` out, and a free port below each node's own"
            yield _error(f"node '{node.name}'", f"its control port {port} is that of '{other}'", fix)


def _error(where: str, message: str, fix: str) -> Finding:
    return Finding(Severity.ERROR, where, message, fix)
