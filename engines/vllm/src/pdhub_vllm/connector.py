"""pdhub's own connector inside a vLLM prefill instance: what routers ask it, what the transfer config tells it.

Its class is in pdhub itself; nothing of it is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from pdhub.api import Call, NodeSpec, Target
from pdhub_vllm.config import VLLMConfig

CLASS: Final = "PDHubConnector"
TOLD: Final = "pdhub"
"""Under this name the connector's answer stands beside the server's own, as the host reads it."""


def is_ours(child: Mapping[str, Any]) -> bool:
    """A child of the transfer config that the host declares for pools of `pdhub node`."""
    return child.get("kv_connector") == CLASS


def child_of(child: Mapping[str, Any], node: NodeSpec, config: VLLMConfig) -> dict[str, Any]:
    """The child, with where its instance answers routers."""
    extra = {**child.get("kv_connector_extra_config", {}), "host": node.host, "port": config.connector_port or 0}
    return {**child, "kv_connector_extra_config": extra}


def ask(instance: Target, port: int) -> Mapping[str, Call]:
    """The further call of a prefill instance's probe."""
    host = urlsplit(instance.url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    return {TOLD: Call("GET", "/prefill", origin=f"http://{host}:{port}")}


def written(info: Mapping[str, Any]) -> frozenset[str]:
    """The KV layout that the connector said it writes."""
    told = info.get(TOLD)
    fingerprint = told.get("fingerprint") if isinstance(told, Mapping) else None
    return frozenset({fingerprint}) if isinstance(fingerprint, str) and fingerprint else frozenset()
