"""``--kv-transfer-config`` of either role: vLLM's own connector, and beside it what other engines declare."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from pdhub.api import NodeSpec
from pdhub_vllm.config import Handoff, VLLMConfig
from pdhub_vllm.connector import child_of, is_ours

CONNECTORS: Final[Mapping[Handoff, str]] = MappingProxyType(
    {
        Handoff.NIXL: "NixlConnector",
        Handoff.NIXL_PUSH: "NixlPushConnector",
        Handoff.MOONCAKE: "MooncakeConnector",
    }
)

LEASE_S: Final[Mapping[Handoff, float]] = MappingProxyType(
    {Handoff.NIXL: 30.0, Handoff.NIXL_PUSH: 30.0, Handoff.MOONCAKE: 45.0, Handoff.PDHUB: 0.0, Handoff.NONE: 0.0}
)
"""What pdhub sets where `lease_s` is not given. Mooncake's own default, 480 s, is how long a prompt's KV stays in the
cache after a decode node died; but it also ends a decode leg whose prefill takes longer."""

HANDOFF: Final = "handoff"
"""Key by which a pool's child says that it wants vLLM's own connector, and which; it never reaches vLLM."""


def lease_of(config: VLLMConfig) -> float:
    """Seconds that a prompt's KV waits for its decode call."""
    return config.lease_s or LEASE_S[config.handoff]


def own(config: VLLMConfig, role: str) -> dict[str, Any]:
    """vLLM's connector for this hand-over.

    Args:
        role: ``kv_producer`` or ``kv_consumer``.
    """
    serve, handoff = config.serve, config.handoff
    extra: dict[str, Any] = {}
    if handoff is Handoff.MOONCAKE:
        extra["mooncake_protocol"] = serve.mooncake_protocol
        if config.bootstrap_url and role == "kv_producer":
            extra["bootstrap_server_address"] = config.bootstrap_url
    else:
        extra["kv_lease_duration"] = max(1, round(lease_of(config)))
        if serve.nixl_backends:
            extra["backends"] = serve.nixl_backends
    out: dict[str, Any] = {"kv_connector": serve.connector or CONNECTORS[handoff], "kv_role": role}
    if serve.connector_module:
        out["kv_connector_module_path"] = serve.connector_module
    if serve.kv_buffer_device and handoff is not Handoff.MOONCAKE:
        out["kv_buffer_device"] = serve.kv_buffer_device
    out["kv_connector_extra_config"] = {**extra, **serve.connector_options}
    return out


def producer(node: NodeSpec, config: VLLMConfig) -> dict[str, Any] | None:
    """Of a prefill instance; None if no pool asks anything of it. ``node.children`` are what its pools declare."""
    children = [child_of(child, node, config) if is_ours(child) else child for child in node.children]
    found = [own(config, "kv_producer")] if any(HANDOFF in child for child in children) else []
    found += [{"kv_role": "kv_producer", **child} for child in children if HANDOFF not in child]
    if not found:
        return None
    identity = {"engine_id": config.engine_id} if config.engine_id else {}
    if len(found) == 1:
        return {**found[0], **identity}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        **identity,
        "kv_connector_extra_config": {"connectors": found},
    }


def consumer(config: VLLMConfig) -> dict[str, Any] | None:
    """Of a pool's node; None if it prefills itself."""
    if config.handoff is Handoff.NONE:
        return None
    return {**own(config, "kv_consumer"), "kv_load_failure_policy": config.serve.load_failure}
