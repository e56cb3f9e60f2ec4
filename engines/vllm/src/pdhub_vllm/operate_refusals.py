"""What cannot work, as far as the configuration alone tells."""

from __future__ import annotations

from collections.abc import Iterator

from pdhub.api import Finding, NodeSpec, Severity, Topology
from pdhub_vllm.config import Handoff, VLLMConfig
from pdhub_vllm.connector import is_ours
from pdhub_vllm.operate_ports import ENGINE, config_of, machine, ours, side_channels
from pdhub_vllm.operate_transfer import CONNECTORS, HANDOFF, lease_of


def refusals(topology: Topology) -> Iterator[Finding]:
    """Findings over all vLLM servers of the topology."""
    names = {node.name for node in topology.nodes}
    for node, config in ours(topology):
        for unknown in sorted(set(config.kv_events) - names):
            fix = f"name a node or prefill instance, such as '{node.name}'"
            yield _error(f"kv_events of '{node.name}'", f"'{unknown}' is none of the configuration", fix)
        if node.role == "prefill":
            yield from _instance(node, config)
        elif config.handoff is Handoff.PDHUB:
            fix = "give the pool another engine, such as `transformers`, or another `handoff`"
            yield _error(f"pool '{node.pool}'", "vLLM's servers take no KV from pdhub's connector", fix)
        elif config.handoff is not Handoff.NONE:
            yield from _pool_node(node, config, topology)
    yield from _ports(topology)


def _instance(node: NodeSpec, config: VLLMConfig) -> Iterator[Finding]:
    """vLLM's connectors all react to ``do_remote_decode``: of two in one instance, one keeps each prompt's KV for a
    decode node that never comes."""
    wanted = sorted({str(child[HANDOFF]) for child in node.children if HANDOFF in child})
    if len(wanted) > 1:
        names = " and ".join(CONNECTORS[Handoff(name)] for name in wanted)
        fix = (
            f"split it: one prefill instance each for {' and '.join(wanted)}, with the pools that it serves in `pools`"
        )
        yield _error(
            f"prefill '{node.name}'", f"it would need {names}, and one instance can have only one of them", fix
        )
    elif wanted and wanted[0] != config.handoff:
        fix = f"set `handoff: {wanted[0]}` of the instance, or name the pools that it serves in `pools`"
        yield _error(
            f"prefill '{node.name}'", f"its handoff is {config.handoff}, that of its pools is {wanted[0]}", fix
        )
    yield from _pdhub(node, config)


def _pdhub(node: NodeSpec, config: VLLMConfig) -> Iterator[Finding]:
    """Pools of `pdhub node` that this instance serves."""
    ours = [child for child in node.children if is_ours(child)]
    if len(ours) > 1:
        fix = "give their engines the same `block_tokens`, or give each its own prefill instance (`pools`)"
        yield _error(f"prefill '{node.name}'", "its pools want KV in other forms or in blocks of different sizes", fix)
    if ours and config.connector_port is None:
        fix = "set `handoff: pdhub` of the instance, or its `pdhub_port` if it serves vLLM's pools too"
        yield _error(f"prefill '{node.name}'", "it serves nodes of `pdhub node` and names no port for them", fix)


def _pool_node(node: NodeSpec, config: VLLMConfig, topology: Topology) -> Iterator[Finding]:
    for prefill in topology.prefills_of(node.pool or ""):
        where = f"pool '{node.pool}'"
        if prefill.engine != ENGINE:
            fix = "name the pools that the instance serves in its `pools`, or let a vLLM instance prefill"
            yield _error(where, f"prefill instance '{prefill.name}' is no vLLM server ({prefill.engine})", fix)
            continue
        other = config_of(prefill)
        if other.handoff is config.handoff and lease_of(other) != lease_of(config):
            message = f"lease_s is {lease_of(config):g} here and {lease_of(other):g} at '{prefill.name}'"
            yield _error(where, message, "give both sides the same `lease_s`: decode renews what prefill granted")


def _ports(topology: Topology) -> Iterator[Finding]:
    """A pool's nodes dodge; two prefill instances of one machine do not, because others must know their ports."""
    seen: dict[tuple[str, int], str] = {}
    channels = side_channels(topology)
    for node, config in ours(topology):
        if node.role != "prefill":
            continue
        wanted = {"bootstrap_port": config.bootstrap_port} if config.handoff is Handoff.MOONCAKE else {}
        if node.name in channels:
            wanted = {"side_channel_port": channels[node.name]}
        if config.connector_port is not None:
            wanted["pdhub_port"] = config.connector_port
        for option, first in wanted.items():
            for port in range(first, first + (1 if option == "bootstrap_port" else config.data_parallel)):
                other = seen.setdefault((machine(node), port), node.name)
                if other != node.name:
                    message = f"port {port} of {machine(node)} is also that of '{other}'"
                    yield _error(f"prefill '{node.name}'", message, f"give one of them another `{option}`")
                    break


def _error(where: str, message: str, fix: str) -> Finding:
    return Finding(Severity.ERROR, where, message, fix)
