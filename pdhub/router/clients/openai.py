"""``openai``: any server that speaks OpenAI's API and prefills itself. No hand-over, bytes are relayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from pdhub.api.client import Base, Bind, Call, EngineClient, Leg, LegOrder, Reply, Target
from pdhub.api.engine import Capabilities
from pdhub.api.errors import EngineFailed
from pdhub.api.plugin import PluginConfig
from pdhub.api.request import Feature

UNKNOWN_CONTEXT = (1 << 31) - 1


class OpenAIConfig(PluginConfig):
    """Options of ``openai``."""

    model: str | None = Field(None, description="The model's name there; default is the served model's name.")
    prefix: str = Field("", pattern=r"^(/[A-Za-z0-9._~-]+)*$", description="Path before `/v1`, such as `/api`.")
    features: list[Feature] | None = Field(None, description="What it can do; default is everything.")
    max_context: int | None = Field(
        None, gt=0, description="Prompt plus output in tokens; default is what `/v1/models` says, else no limit."
    )
    max_logprobs: int = Field(20, ge=0, description="Most log probabilities a token.")
    slots: int = Field(256, ge=1, description="Requests sent to one node at once; more wait in the queue.")


def declared(config: OpenAIConfig) -> Capabilities:
    """What is known of a server before it was asked."""
    features = frozenset(Feature) if config.features is None else frozenset(config.features)
    return Capabilities(features, config.max_context or UNKNOWN_CONTEXT, config.max_logprobs, config.slots)


class OpenAIClient(EngineClient):
    """See :class:`pdhub.api.EngineClient`."""

    order = LegOrder.DECODE_ONLY
    bind = Bind.LATE

    def __init__(self, config: OpenAIConfig) -> None:
        self._config = config

    def probe(self, node: Target) -> Call:
        return Call("GET", self._config.prefix + "/v1/models")

    def capabilities(self, info: Mapping[str, Any]) -> Capabilities:
        ours = [card for card in _cards(info) if self._is_ours(card)]
        if not ours:
            # A server that still loads its model may answer, and then let a request hang.
            raise EngineFailed(
                f"does not list the model '{self._config.model}'" if self._config.model else "lists no model"
            )
        context = self._config.max_context
        if context is None:
            told = [card.get("max_model_len") for card in ours]
            context = next((c for c in told if isinstance(c, int) and c > 0), UNKNOWN_CONTEXT)
        return replace(declared(self._config), max_context=context)

    def prefill(self, leg: Leg) -> None:
        return None

    def decode(self, leg: Leg) -> Call:
        wanted = self._config.model or leg.request.model
        path = self._config.prefix + leg.request.endpoint
        if leg.body.get("model") == wanted:
            return Call("POST", path, base=Base.CLIENT, reply=Reply.RELAY)
        return Call("POST", path, base=Base.CLIENT, set={"model": wanted}, reply=Reply.RELAY)

    def _is_ours(self, card: Mapping[str, Any]) -> bool:
        return self._config.model is None or card.get("id") == self._config.model


def _cards(info: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    data = info.get("data")
    return [card for card in data if isinstance(card, Mapping)] if isinstance(data, list) else []
