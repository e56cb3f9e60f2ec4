"""Side-channel ports: every NIXL server listens on one for each of its data-parallel ranks."""

from __future__ import annotations

from pdhub.api import NodeSpec, Topology
from pdhub_vllm.config import Handoff, VLLMConfig

ENGINE = "vllm"


def config_of(node: NodeSpec) -> VLLMConfig:
    """A node's options, typed."""
    return VLLMConfig.model_validate(dict(node.config))


def ours(topology: Topology) -> list[tuple[NodeSpec, VLLMConfig]]:
    """vLLM servers of the topology, prefill instances first."""
    found = [(node, config_of(node)) for node in topology.nodes if node.engine == ENGINE]
    return sorted(found, key=lambda pair: pair[0].role != "prefill")


def side_channels(topology: Topology) -> dict[str, int]:
    """First side-channel port by node name.

    A prefill instance has the one of its options, because routers and decode nodes may have to know it. The nodes of a
    pool share their options, so each takes the next free ports of its machine from there on, the same for whoever asks.
    """
    taken: dict[str, set[int]] = {}
    for node in topology.nodes:
        taken.setdefault(machine(node), set()).add(node.port)
    out: dict[str, int] = {}
    for node, config in ours(topology):
        if config.handoff not in (Handoff.NIXL, Handoff.NIXL_PUSH):
            continue
        used, port, ranks = taken[machine(node)], config.side_channel_port, config.data_parallel
        if node.role != "prefill":
            while used & set(range(port, port + ranks)):
                port += 1
        used |= set(range(port, port + ranks))
        out[node.name] = port
    return out


def side_channel_host(node: NodeSpec, config: VLLMConfig) -> str:
    """The address at which other machines reach its side channel."""
    return config.side_channel_host or machine(node)


def machine(node: NodeSpec) -> str:
    """Its host, one name for all that mean this machine."""
    return "127.0.0.1" if node.host in ("localhost", "0.0.0.0", "::", "::1", "") else node.host
