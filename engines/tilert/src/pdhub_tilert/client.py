"""The router's side of a stock TileRT decode server.

Prefill goes to a vLLM server whose TileRTConnector claims the request by its ``kv_transfer_params`` and writes the KV
into the node; the node is then asked to decode under the same id, and streams tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from pdhub.api import (
    AdmissionRejected,
    Base,
    Bind,
    Call,
    Capabilities,
    EngineClient,
    EngineFailed,
    EngineLoad,
    Freed,
    InvalidRequest,
    Leg,
    LegOrder,
    PrefillResult,
    Reply,
    RequestError,
    Target,
    TransferFailed,
)
from pdhub_tilert.abilities import of_node
from pdhub_tilert.config import FirstToken, TileRTConfig
from pdhub_tilert.frames import TileRTFrames
from pdhub_tilert.profiles import kv_bytes
from pdhub_tilert.refusals import error_of

CHAT: Final = "/v1/chat/completions"


class TileRTClient(EngineClient):
    """See :class:`pdhub.api.EngineClient`. One request a node; it is asked whether it is free before prefill."""

    order = LegOrder.PREFILL_FIRST
    bind = Bind.EARLY  # prefill has to know where to write
    freed = Freed.CANCEL
    speaks_tokens = True

    def __init__(self, config: TileRTConfig) -> None:
        self._config = config
        self.handovers = config.handovers or None
        self.settle_s = config.settle_s
        self.fence_s = config.tombstone_s

    def probe(self, node: Target) -> Call:
        return Call("GET", "/capabilities")

    def capabilities(self, info: Mapping[str, Any]) -> Capabilities:
        told = info.get("profile")
        if told is not None and told != self._config.profile:
            raise EngineFailed(f"serves the profile '{told}', not '{self._config.profile}'")
        return of_node(self._config, info)

    def load(self, node: Target) -> Call:
        return Call("GET", "/decode_status")

    def parse_load(self, info: Mapping[str, Any]) -> EngineLoad:
        return EngineLoad(running=int(_busy(info)), waiting=0)

    def claim(self, leg: Leg) -> Call:
        """Nothing can be reserved; but another router's request must not cost this one a prefill."""
        return Call("GET", "/decode_status")

    def prefill(self, leg: Leg) -> Call:
        assert leg.prefill is not None
        if leg.claim is not None and _busy(leg.claim):
            raise AdmissionRejected(f"'{leg.decode.name}' is busy", code="busy")
        host, port = control_of(self._config, leg.decode.url)
        members: dict[str, Any] = {
            **_sampling(leg),
            "model": leg.prefill.config.get("model") or leg.request.model,
            "kv_transfer_params": {"tilert_host": host, "tilert_ctrl_port": port},
        }
        if leg.body.get("tools"):
            # renders the same prompt; anything else is an error on a server without automatic tool choice
            members["tool_choice"] = "none"
        if leg.body.get("include_reasoning") is False:
            members["include_reasoning"] = True  # a server with a reasoning parser tells no token ids without
        if self._config.first_token is FirstToken.IDS:
            members["return_token_ids"] = True
        if leg.request.logprobs is not None or self._config.first_token is FirstToken.LOGPROBS:
            members |= _logprobs(leg)
        # The id of the hand-over: hexadecimal without a dash, which TileRT's reading of vLLM's ids leaves as it is.
        return Call(
            "POST", leg.request.endpoint, base=Base.PREFILL, set=members, headers={"x-request-id": leg.transfer_id}
        )

    def decode(self, leg: Leg) -> Call:
        result = _answered(leg)
        body: dict[str, Any] = {
            "rid": leg.transfer_id,
            "first_token_id": _first_token(result),
            "max_tokens": self._max_tokens(leg, result),
            "sampling": _sampling(leg) | ({"ignore_eos": True} if leg.body.get("ignore_eos") else {}),
            "timeout_s": leg.budget_s,
            "stream": True,
        }
        if leg.request.logprobs is not None:
            body["top_logprobs"] = leg.request.logprobs
        return Call("POST", "/pd/decode", set=body, reply=Reply.TOKENS)

    def cancel(self, leg: Leg) -> Call | None:
        """Before prefill answered the node knows nothing of it."""
        return None if leg.result is None else Call("POST", "/pd/cancel", set={"rid": leg.transfer_id})

    def frames_of(self, leg: Leg) -> TileRTFrames:
        result = _answered(leg)
        tokens = _prompt_tokens(result)
        return TileRTFrames(
            _first_token(result),
            self._max_tokens(leg, result),
            first_logprob=result.first_logprob,
            logprobs=leg.request.logprobs,
            kv_bytes=kv_bytes(self._config.profile, self._config.kv_cache_dtype, self._config.mtp, tokens),
        )

    def refused(self, status: int, body: Mapping[str, Any]) -> RequestError | None:
        return error_of(body, status)

    def _max_tokens(self, leg: Leg, result: PrefillResult) -> int:
        limit = self.capabilities(leg.decode.info).max_context
        room = limit - _prompt_tokens(result)
        if room < 1:
            message = f"the prompt has {_prompt_tokens(result)} tokens, the node has a context of {limit}"
            raise InvalidRequest(message, code="context_length_exceeded")
        return max(1, min(leg.request.max_tokens or room, room))


def control_of(config: TileRTConfig, url: str) -> tuple[str, int]:
    """Where prefill instances reach a node's control port."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return config.ctrl_host or parts.hostname, config.ctrl_port or parts.port - 1


def _sampling(leg: Leg) -> dict[str, Any]:
    """Explicit on both legs, so that no server's own defaults apply to one of them."""
    s = leg.sampling
    return {
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "min_p": s.min_p,
        "repetition_penalty": s.repetition_penalty,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
    }


def _logprobs(leg: Leg) -> dict[str, Any]:
    wanted = max(1, leg.request.logprobs or 0)
    named = {"return_tokens_as_token_ids": True}
    if leg.request.endpoint == CHAT:
        return named | {"logprobs": True, "top_logprobs": wanted}
    return named | {"logprobs": wanted}


def _answered(leg: Leg) -> PrefillResult:
    """Raises TransferFailed if prefill wrote the KV under another id than the node will be asked for."""
    if leg.result is None:
        raise TransferFailed("prefill has not answered")
    told = str(leg.result.body.get("id", ""))
    if told.removeprefix("chatcmpl-").removeprefix("cmpl-") != leg.transfer_id:
        raise TransferFailed("the prefill instance did not take the request's id: something in between replaced it")
    return leg.result


def _first_token(result: PrefillResult) -> int:
    if result.first_token is not None:
        return result.first_token
    if result.first_logprob is not None:
        return result.first_logprob.token_id
    raise EngineFailed("the prefill instance did not tell its token")


def _prompt_tokens(result: PrefillResult) -> int:
    usage = result.body.get("usage")
    told = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
    tokens = len(result.prompt_token_ids) or (told if isinstance(told, int) else 0)
    if not tokens:
        raise EngineFailed("the prefill instance did not tell the prompt's length")
    return tokens


def _busy(status: Mapping[str, Any]) -> bool:
    if status.get("status") not in ("busy", "idle"):
        raise EngineFailed("the node does not say whether it is busy")
    return bool(status["status"] == "busy")
