"""The router's side of a stock vLLM server: what all hand-overs share, and the aggregated one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdhub.api import (
    Base,
    Bind,
    CacheFeed,
    Call,
    Capabilities,
    ConfigError,
    EngineClient,
    EngineFailed,
    EngineLoad,
    Freed,
    Leg,
    LegOrder,
    Reply,
    Target,
)
from pdhub_vllm.abilities import UNKNOWN_CONTEXT, declared
from pdhub_vllm.config import Handoff, VLLMConfig
from pdhub_vllm.connector import ask, written
from pdhub_vllm.metrics import read_load, read_orca, read_server_load


class VLLMClient(EngineClient):
    """See :class:`pdhub.api.EngineClient`. The same class speaks to a pool's nodes and to prefill instances."""

    def __init__(self, config: VLLMConfig) -> None:
        self._config = config

    def probe(self, node: Target) -> Call:
        return Call("GET", "/v1/models")

    def details(self, node: Target) -> Mapping[str, Call]:
        port = self._config.connector_port
        return ask(node, port) if port is not None and node.role == "prefill" else {}

    def writes(self, instance: Target) -> frozenset[str]:
        return written(instance.info)

    def capabilities(self, info: Mapping[str, Any]) -> Capabilities:
        ours = [card for card in _cards(info) if self._config.model in (None, card.get("id"))]
        if not ours:
            name = self._config.model
            raise EngineFailed(f"does not list the model '{name}'" if name else "lists no model")
        context = self._config.max_context
        if context is None:
            told = [card.get("max_model_len") for card in ours]
            context = next((c for c in told if isinstance(c, int) and c > 0), UNKNOWN_CONTEXT)
        return replace(declared(self._config), max_context=context)

    def alone(self, leg: Leg) -> Call:
        # The salt keeps blocks that came over the wire out of the answer that they are compared with.
        changes = {**self.renamed(leg), "cache_salt": leg.transfer_id}
        return Call("POST", leg.request.endpoint, base=Base.CLIENT, set=changes, reply=Reply.JSON)

    def load(self, node: Target) -> Call | None:
        if self._config.server_load:
            return Call("GET", "/load")
        return Call("GET", "/metrics", reply=Reply.TEXT) if self._config.metrics else None

    def parse_load(self, info: Mapping[str, Any]) -> EngineLoad:
        return read_server_load(info) if self._config.server_load else read_load(str(info.get("text", "")))

    def told_load(self, headers: Mapping[str, str]) -> EngineLoad | None:
        return read_orca(headers) if self._config.orca else None

    def cache_feeds(self, node: Target) -> Sequence[CacheFeed]:
        source = self._config.kv_events.get(node.name)
        if source is None:
            return ()
        try:
            from pdhub_vllm.kv_feed import ZmqFeed, ranked
        except ImportError as error:
            hint = "pip install 'pdhub-vllm[kv-events]'"
            raise ConfigError("`kv_events` needs pyzmq", where=f"kv_events of '{node.name}'", hint=hint) from error
        ranks = range(self._config.data_parallel)
        return [
            ZmqFeed(ranked(source.endpoint, r), source.replay and ranked(source.replay, r), source.topic) for r in ranks
        ]

    def asks(self, server: Target | None) -> dict[str, str]:
        """Headers of a leg. A prefill instance has options of its own."""
        return {"endpoint-load-metrics-format": "TEXT"} if server and server.config.get("orca") else {}

    def relayed(self, leg: Leg, **patch: Any) -> Call:
        """The decode leg: the client's body, relayed back, under the model's name there.

        Args:
            patch: further arguments of the call.
        """
        changes = {**self.renamed(leg), **patch.pop("set", {})}
        return Call("POST", leg.request.endpoint, base=Base.CLIENT, set=changes, reply=Reply.RELAY, **patch)

    def renamed(self, leg: Leg) -> dict[str, Any]:
        """The member that says the model's name, if the client's word is not the server's."""
        wanted = self._config.model or leg.request.model
        return {} if leg.body.get("model") == wanted else {"model": wanted}


class AggregatedClient(VLLMClient):
    """``handoff: none``: the server prefills itself."""

    order = LegOrder.DECODE_ONLY
    bind = Bind.LATE
    freed = Freed.CLOSE

    def prefill(self, leg: Leg) -> None:
        return None

    def decode(self, leg: Leg) -> Call:
        return self.relayed(leg, headers=self.asks(leg.decode))


def client_of(config: VLLMConfig) -> EngineClient:
    """The client of a hand-over."""
    from pdhub_vllm.client_mooncake import MooncakeClient
    from pdhub_vllm.client_nixl import PullClient, PushClient
    from pdhub_vllm.client_pdhub import PDHubClient

    clients: Mapping[Handoff, type[VLLMClient]] = {
        Handoff.NIXL: PullClient,
        Handoff.NIXL_PUSH: PushClient,
        Handoff.MOONCAKE: MooncakeClient,
        Handoff.PDHUB: PDHubClient,
        Handoff.NONE: AggregatedClient,
    }
    return clients[config.handoff](config)


def _cards(info: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    data = info.get("data")
    return [card for card in data if isinstance(card, Mapping)] if isinstance(data, list) else []
