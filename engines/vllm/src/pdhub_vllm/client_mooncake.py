"""vLLM's MooncakeConnector: prefill writes, decode asks it to; who is who is found at a bootstrap server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pdhub.api import Bind, Call, Capabilities, EngineFailed, Freed, Leg, LegOrder, Target, TransferFailed
from pdhub_vllm.client_legs import SplitClient, has_ranks, rank_of
from pdhub_vllm.config import Handoff


class MooncakeClient(SplitClient):
    """``mooncake``: both legs at once, one transfer id. There are no heartbeats: what nobody fetches waits for
    ``VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT``, and so does a decode leg that nobody writes to.

    The bootstrap server is asked with every probe, so that a restarted instance is known by its new id.
    """

    handoff = Handoff.MOONCAKE
    order = LegOrder.TOGETHER
    bind = Bind.EARLY
    default_lease_s = 45.0
    freed = Freed.LEASE

    @property
    def lets_go_s(self) -> float:  # type: ignore[override]
        """Decode gives up with the lease."""
        return self.lease_s

    @property
    def lets_go_lost_s(self) -> float:  # type: ignore[override]
        """A decode that has asked an instance which is gone waits 60 s more, which are fixed in vLLM."""
        return self.lease_s + 60.0

    def details(self, node: Target) -> Mapping[str, Call]:
        if node.role != "prefill":
            return {}
        return {**super().details(node), "bootstrap": Call("GET", "/query", origin=bootstrap_of(node))}

    def capabilities(self, info: Mapping[str, Any]) -> Capabilities:
        known = super().capabilities(info)
        if "bootstrap" in info and not engines(info):
            raise EngineFailed("its bootstrap server knows no engine yet")
        return known

    def rank_header(self, leg: Leg) -> dict[str, str]:
        return {"x-data-parallel-rank": str(rank_of(leg))} if has_ranks(leg) else {}

    def prefill_extra(self, leg: Leg) -> Mapping[str, Any]:
        # Only a prompt that ended by its length is handed over. The host has dropped every stop condition but this.
        return {"ignore_eos": True}

    def prefill_params(self, leg: Leg) -> Mapping[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": leg.transfer_id}

    def decode_params(self, leg: Leg) -> dict[str, Any]:
        assert leg.prefill is not None
        engine_id = engines(leg.prefill.info).get(rank_of(leg))
        if engine_id is None:
            raise TransferFailed("the prefill instance's bootstrap server does not know its engine")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": leg.transfer_id,
            "remote_bootstrap_addr": bootstrap_of(leg.prefill),
            "remote_engine_id": engine_id,
        }


def bootstrap_of(instance: Target) -> str:
    """Where the instance's workers register, ``http://host:port``."""
    told = instance.config.get("bootstrap_url")
    if told:
        return str(told)
    host = urlsplit(instance.url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{instance.config.get('bootstrap_port', 8998)}"


def engines(info: Mapping[str, Any]) -> dict[int, str]:
    """Engine ids by data-parallel rank, as the bootstrap server told them."""
    answer = info.get("bootstrap")
    found: dict[int, str] = {}
    for rank, entry in answer.items() if isinstance(answer, Mapping) else ():
        if str(rank).isdigit() and isinstance(entry, Mapping) and entry.get("engine_id"):
            found[int(rank)] = str(entry["engine_id"])
    return found
