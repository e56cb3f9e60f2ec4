"""``handoff: pdhub``: a prefill instance whose KV goes to nodes of `pdhub node`. Their client describes both legs."""

from __future__ import annotations

from pdhub.api import Bind, Call, EngineFailed, Freed, InvalidRequest, Leg, LegOrder
from pdhub_vllm.client import VLLMClient


class PDHubClient(VLLMClient):
    """Probes, load and what it writes; it is never a pool's."""

    order = LegOrder.PREFILL_FIRST
    bind = Bind.EARLY
    freed = Freed.CLOSE

    def prefill(self, leg: Leg) -> Call:
        raise InvalidRequest("a vLLM server with `handoff: pdhub` prefills for nodes of other engines only")

    def decode(self, leg: Leg) -> Call:
        raise EngineFailed("a vLLM server with `handoff: pdhub` does not decode for others")
