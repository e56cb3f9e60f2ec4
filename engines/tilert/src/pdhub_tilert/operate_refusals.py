"""What cannot work, as far as the configuration alone tells."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdhub.api import Finding, NodeSpec, Severity, Topology
from pdhub_tilert.client import control_of
from pdhub_tilert.config import TileRTConfig
from pdhub_tilert.operate_serve import CONNECTOR, ours, prefill_words, senders, shards
from pdhub_tilert.profiles import PAGE, Profile


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
    """Its arguments and environment. Of an instance that somebody else starts they are only what is written down."""
    severity = Severity.ERROR if prefill.launch else Severity.WARNING
    where = f"prefill '{prefill.name}'"
    serve = prefill.config.get("serve")
    serve = serve if isinstance(serve, Mapping) else {}
    args, env = [str(word) for word in serve.get("args") or ()], serve.get("env") or {}
    for flag, value in prefill_words(config).items():
        found = _value(args, flag)
        if not _same(flag, found, value):
            message = f"{flag} is {found!r} at vLLM, its TileRT nodes need {value!r}"
            yield Finding(severity, where, message, f"put `{flag} '{value}'` into serve.args")
    if config.profile is Profile.DSV32 and _value(args, "--speculative-config") is not None:
        message = "the profile dsv32 wants 61 layers of KV, and a draft layer is one more"
        yield Finding(severity, where, message, "leave out --speculative-config")
    block = _value(args, "--block-size")
    if block is not None and block != str(PAGE):
        yield Finding(severity, where, f"--block-size is {block}", f"TileRT's pages have {PAGE} tokens")
    told = str(env.get("TILERT_PD_SENDERS", "8"))
    if told != str(senders(config)):
        message = f"TILERT_PD_SENDERS is {told} at prefill and {senders(config)} at its nodes: every hello is refused"
        yield Finding(severity, where, message, f"put `TILERT_PD_SENDERS: '{senders(config)}'` into serve.env")


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


def _value(args: Sequence[str], flag: str) -> str | None:
    for at, word in enumerate(args):
        if word == flag:
            return args[at + 1] if at + 1 < len(args) else ""
        if word.startswith(flag + "="):
            return word[len(flag) + 1 :]
    return None


def _same(flag: str, found: str | None, wanted: str) -> bool:
    if flag == "--kv-cache-dtype" and wanted == "auto":
        return found in (None, "auto", "bfloat16", "bf16")
    if flag == "--speculative-config":
        return bool(_method(found) == _method(wanted))
    return found == wanted


def _method(text: str | None) -> Any:
    try:
        document = json.loads(text or "null")
    except ValueError:
        return None
    return document.get("method") if isinstance(document, dict) else None


def _error(where: str, message: str, fix: str) -> Finding:
    return Finding(Severity.ERROR, where, message, fix)
