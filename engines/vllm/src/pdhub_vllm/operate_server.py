"""One live server by itself: is it what the configuration says, and can others reach its connector?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

from pdhub.api import Finding, Severity
from pdhub_vllm.client_mooncake import engines
from pdhub_vllm.client_nixl import ASK
from pdhub_vllm.config import Handoff, VLLMConfig
from pdhub_vllm.operate_facts import Facts, ask, listens
from pdhub_vllm.operate_ports import machine, side_channel_host
from pdhub_vllm.versions import CHECKED

TROUBLES: Final[Mapping[str, tuple[str, str]]] = {
    "vllm:nixl_num_kv_expired_reqs": (
        "prompts whose KV expired before decode fetched it",
        "raise `lease_s` on both sides, or lower the pool's `slots`: decode requests wait too long",
    ),
    "vllm:nixl_num_notifications_after_expiry": (
        "prompts were read after their KV had expired: the answers may be wrong",
        "raise `lease_s` on both sides, or lower the pool's `slots`: decode requests wait too long",
    ),
    "vllm:nixl_num_failed_transfers": (
        "transfers failed",
        "look at the log of this server for NIXL's message",
    ),
    "vllm:nixl_num_failed_notifications": ("notifications failed", "look at the log of this server for NIXL's message"),
    "vllm:mooncake_num_kv_expired_reqs": (
        "prompts whose KV expired before decode fetched it",
        "raise `lease_s` on both sides, or lower the pool's `slots`: decode requests wait too long",
    ),
    "vllm:mooncake_num_failed_transfers": ("transfers failed", "look at the log of this server for Mooncake's message"),
    "vllm:mooncake_num_failed_recvs": ("transfers failed", "look at the log of this server for Mooncake's message"),
}


def examine(facts: Facts, config: VLLMConfig, model: str) -> Iterator[Finding]:
    """Findings about one server that answers.

    Args:
        model: the served model's name in the configuration.
    """
    where, name = facts.node.name, config.model or model
    if name not in facts.models:
        told = ", ".join(sorted(facts.models)) or "none"
        fix = f"start it with `--served-model-name {name}`, or set `model` of its options"
        yield Finding(Severity.ERROR, where, f"does not serve '{name}' (it serves: {told})", fix)
        return
    if _minor(facts.version) not in CHECKED:
        message = f"vLLM {facts.version or 'of unknown version'}; known are {CHECKED[0]} to {CHECKED[-1]}"
        yield Finding(Severity.WARNING, where, message, "see the table in the README of pdhub-vllm")
    yield from _scale_out(facts)
    for metric, (what, fix) in TROUBLES.items():
        if (count := facts.metrics.get(metric, 0)) > 0:
            yield Finding(Severity.WARNING, where, f"{count:.0f} {what} since it started", fix)
    yield from _speed(facts)
    if facts.node.role == "prefill":
        yield from _connector(facts, config, name)


def _speed(facts: Facts) -> Iterator[Finding]:
    """Of a pull decode counts, of a push prefill."""
    seconds, size = (
        facts.metrics.get(f"vllm:nixl_{name}_sum", 0.0) for name in ("xfer_time_seconds", "bytes_transferred")
    )
    if seconds > 0 and size > 0:
        message = f"has moved {size / 1e6:.1f} MB of KV at {size / seconds / 1e9:.2f} GB/s, by its own measure"
        yield Finding(Severity.INFO, facts.node.name, message)


def _scale_out(facts: Facts) -> Iterator[Finding]:
    status = ask(facts.node, "/inference/v1/generate", {}).status
    if status in (403, 404):
        message = "token-in, token-out endpoints are off; pdhub does not need them"
        yield Finding(Severity.INFO, facts.node.name, message, "start it with `--enable-scale-out` (0.30 and later)")


def _connector(facts: Facts, config: VLLMConfig, name: str) -> Iterator[Finding]:
    if config.handoff is Handoff.MOONCAKE:
        yield from _bootstrap(facts, config)
    elif config.handoff is not Handoff.NONE and facts.node.serves:
        yield from _nixl(facts, config, name)


def _nixl(facts: Facts, config: VLLMConfig, name: str) -> Iterator[Finding]:
    """Hand over one token: where decode nodes would be sent to is in the answer. Its block waits for the lease."""
    where = facts.node.name
    body = {"model": name, "prompt": "a", "max_tokens": 1, "kv_transfer_params": dict(ASK)}
    answer = ask(facts.node, "/v1/completions", body, within_s=20.0)
    document = answer.json()
    told: Any = document.get("kv_transfer_params") if isinstance(document, dict) else None
    if not isinstance(told, dict) or not told.get("remote_engine_id"):
        message = f"hands nothing over (status {answer.status}): it has no NIXL connector for `{config.handoff}`"
        yield Finding(Severity.ERROR, where, message, f"start it as `pdhub vllm command CONFIG {where}` says")
        return
    mode = "push" if config.handoff is Handoff.NIXL_PUSH else "pull"
    if (other := told.get("transfer_mode")) not in (None, mode):
        message = f"its connector is {other}, its `handoff` is {config.handoff}"
        yield Finding(Severity.ERROR, where, message, f"start it as `pdhub vllm command CONFIG {where}` says")
    host, port = str(told.get("remote_host")), int(told.get("remote_port") or 0)
    if host in ("localhost", "127.0.0.1", "::1") and machine(facts.node) != "127.0.0.1":
        message = f"sends decode nodes to {host}: none on another machine can reach its side channel"
        yield Finding(Severity.ERROR, where, message, "set VLLM_NIXL_SIDE_CHANNEL_HOST to its address")
    elif not listens(host, port):
        message = f"its side channel {host}:{port} cannot be reached from this machine"
        yield Finding(Severity.ERROR, where, message, "open the port, or set VLLM_NIXL_SIDE_CHANNEL_HOST")
    if config.engine_id and config.data_parallel == 1:
        wanted = {
            "engine_id": (config.engine_id, told.get("remote_engine_id")),
            "side_channel_host": (side_channel_host(facts.node, config), host),
            "side_channel_port": (config.side_channel_port, port),
            "tensor_parallel": (config.tensor_parallel, told.get("tp_size")),
        }
        for option, (ours, theirs) in wanted.items():
            if ours != theirs:
                message = f"`{option}` is {ours!r} in the configuration and {theirs!r} there"
                yield Finding(Severity.ERROR, where, message, "make both equal; a pushed request is sent there unasked")


def _bootstrap(facts: Facts, config: VLLMConfig) -> Iterator[Finding]:
    where = facts.node.name
    url = config.bootstrap_url or f"http://{urlsplit(facts.node.url).hostname}:{config.bootstrap_port}"
    answer = ask(replace(facts.node, url=url, api_key=None), "/query")
    if answer.status != 200:
        reason = answer.body if answer.status == 0 else f"status {answer.status}"
        fix = "set VLLM_MOONCAKE_BOOTSTRAP_PORT of the instance to `bootstrap_port`, and open the port"
        yield Finding(Severity.ERROR, where, f"its bootstrap server {url} does not answer ({reason})", fix)
        return
    ranks = engines({"bootstrap": answer.json()})
    missing = [rank for rank in range(config.data_parallel) if rank not in ranks]
    if missing:
        message = f"its bootstrap server knows no engine for rank {', '.join(map(str, missing))}"
        yield Finding(Severity.ERROR, where, message, "set `data_parallel` to the number of its ranks")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
