"""Everything that `pdhub doctor` asks of vLLM servers with one set of options."""

from __future__ import annotations

from collections.abc import Iterator

from pdhub.api import Finding, Severity, Topology
from pdhub_vllm import operate_devices, operate_pairs, operate_server
from pdhub_vllm.config import Handoff, VLLMConfig
from pdhub_vllm.operate_facts import Facts, learn
from pdhub_vllm.operate_ports import ENGINE, ours
from pdhub_vllm.operate_refusals import refusals
from pdhub_vllm.operate_transfer import lease_of


def checks(config: VLLMConfig, topology: Topology) -> Iterator[Finding]:
    """Findings about the servers with these options, and about each pair that one of them decodes for."""
    yield from refusals(topology)
    known: dict[str, Facts] = {}
    for node, options in ours(topology):
        if options != config:
            continue
        facts = known[node.name] = learn(node)
        if facts.problem:
            yield Finding(
                Severity.ERROR, node.name, facts.problem, f"`pdhub vllm command CONFIG {node.name}` starts it"
            )
            continue
        yield from operate_server.examine(facts, options, topology.model)
        if options.handoff is not Handoff.NONE:
            yield from operate_devices.examine(node, options)
            yield _lease(node.name, options)
    for facts in list(known.values()):
        if facts.node.pool is None or facts.problem:
            continue
        for prefill in topology.prefills_of(facts.node.pool):
            if prefill.engine != ENGINE:
                continue
            other = known[prefill.name] = known.get(prefill.name) or learn(prefill)
            if not other.problem:
                yield from operate_pairs.compare(other, facts, topology.model)


def _lease(where: str, config: VLLMConfig) -> Finding:
    """A running server does not tell its own."""
    name = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT" if config.handoff is Handoff.MOONCAKE else "kv_lease_duration"
    message = f"a prompt's KV is expected to wait {lease_of(config):g} s for decode; the server does not tell"
    return Finding(Severity.INFO, where, message, f"check that its {name} says the same")
