"""The client of every engine that ``pdhub node`` hosts: claim, prefill, decode, cancel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdhub.api.client import Base, Bind, Call, EngineClient, Freed, Leg, LegOrder, Reply, Target
from pdhub.api.engine import Capabilities, EngineLoad
from pdhub.api.errors import EngineFailed
from pdhub.router.clients.frames import NodeFrames
from pdhub.router.features import logprobs_of
from pdhub.router.handed import told_by
from pdhub.router.openai import CHAT_PATH
from pdhub.router.sampling import members_of
from pdhub.wire.capabilities import heard
from pdhub.wire.http import (
    HANDOFF_KEY,
    CancelBody,
    ClaimBody,
    ClaimReply,
    DecodeBody,
    HandoffParams,
    LoadReply,
    NodeInfo,
    SamplingBody,
)


class NodeClient(EngineClient):
    """See :class:`pdhub.api.EngineClient`. Prefill first, bound early: the landing is claimed before prefill.

    Args:
        claim_ttl_s: a claim that no writer joins ends after this.
    """

    order = LegOrder.PREFILL_FIRST
    freed = Freed.CANCEL
    bind = Bind.EARLY
    speaks_tokens = True

    def __init__(self, claim_ttl_s: float = 30.0) -> None:
        self._claim_ttl_s = claim_ttl_s

    def probe(self, node: Target) -> Call:
        return Call("GET", "/capabilities")

    def capabilities(self, info: Mapping[str, Any]) -> Capabilities:
        return heard(_convert(info, NodeInfo).capabilities)

    def accepts(self, info: Mapping[str, Any]) -> frozenset[str]:
        return frozenset(_convert(info, NodeInfo).accepts) if info else frozenset()

    def claim(self, leg: Leg) -> Call:
        assert leg.prefill is not None, "a claim names the layout that prefill writes"
        body = ClaimBody(
            transfer_id=leg.transfer_id,
            request_id=leg.request_id,
            tokens=leg.request.prompt_tokens,
            max_tokens=leg.request.max_tokens or 0,
            fingerprint=str(told_by(leg.prefill.info).get("fingerprint", "")),
            ttl_s=self._claim_ttl_s,
        )
        return Call("POST", "/claim", set=msgspec.to_builtins(body))

    def prefill(self, leg: Leg) -> Call:
        assert leg.prefill is not None
        claim = _convert(leg.claim or {}, ClaimReply)
        params = HandoffParams(
            transfer_id=leg.transfer_id,
            generation=claim.generation,
            host=claim.host,
            port=claim.port,
            fingerprint=claim.fingerprint,
            budget_s=leg.budget_s,
            min_tokens=leg.body.get("min_tokens") or 0,
            stop_token_ids=leg.body.get("stop_token_ids") or [],
            capacity_tokens=claim.capacity_tokens,
            prompt_limit=claim.prompt_limit,
            context=self.capabilities(leg.decode.info).max_context if claim.prompt_limit else 0,
        )
        members: dict[str, Any] = {
            **members_of(leg.sampling),
            **_served(leg),
            "return_token_ids": True,
            "kv_transfer_params": {HANDOFF_KEY: msgspec.to_builtins(params)},
        }
        if leg.body.get("seed") is None and HANDOFF_KEY in leg.prefill.info:
            # drawn by the host: vLLM samples seeded requests apart, and on a CPU one in several chunks ends its engine
            members.pop("seed", None)
        if leg.request.logprobs is not None:
            members["return_tokens_as_token_ids"] = True
        prompt = leg.body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            members["prompt"] = prompt[0]
        return Call("POST", leg.request.endpoint, base=Base.PREFILL, set=members, reply=Reply.JSON)

    def decode(self, leg: Leg) -> Call:
        claim = _convert(leg.claim or {}, ClaimReply)
        result = leg.result
        if result is None or result.first_token is None or not result.prompt_token_ids:
            raise EngineFailed("the prefill instance did not tell its token ids")
        room = self.capabilities(leg.decode.info).max_context - len(result.prompt_token_ids)
        first = result.first_logprob
        body = DecodeBody(
            transfer_id=leg.transfer_id,
            generation=claim.generation,
            request_id=leg.request_id,
            prompt_token_ids=[],
            first_token=result.first_token,
            max_tokens=max(1, min(leg.request.max_tokens or room, room)),
            sampling=_sampling(leg),
            first_logprob=None if first is None else (first.token_id, first.logprob, list(first.top)),
            min_tokens=leg.body.get("min_tokens") or 0,
            ignore_eos=bool(leg.body.get("ignore_eos")),
            stop_token_ids=leg.body.get("stop_token_ids") or [],
            logprobs=logprobs_of(leg.body, leg.request.endpoint == CHAT_PATH),
            wait_s=leg.budget_s,
        )
        # Of thousands no copy is made: decode waits.
        members = {**msgspec.to_builtins(body), "prompt_token_ids": result.prompt_token_ids}
        return Call("POST", "/decode", set=members, reply=Reply.TOKENS)

    def cancel(self, leg: Leg) -> Call:
        body = CancelBody(transfer_id=leg.transfer_id, reason="the request ended")
        return Call("POST", "/cancel", set=msgspec.to_builtins(body))

    def load(self, node: Target) -> Call:
        return Call("GET", "/load")

    def parse_load(self, info: Mapping[str, Any]) -> EngineLoad:
        load = _convert(info, LoadReply)
        return EngineLoad(load.running, load.waiting, load.kv_usage, load.remaining_tokens)

    def frames(self) -> NodeFrames:
        return NodeFrames()


def _served(leg: Leg) -> dict[str, Any]:
    """What a vLLM server must be told, because its connector reads no more than where the KV goes."""
    assert leg.prefill is not None
    members: dict[str, Any] = {"model": leg.prefill.config.get("model") or leg.request.model}
    if HANDOFF_KEY not in leg.prefill.info:  # an embedded prefill instance reads the hand-over's own members
        return members
    if leg.body.get("min_tokens"):
        members |= {"min_tokens": 1, "stop_token_ids": leg.body.get("stop_token_ids") or []}
    if leg.body.get("tools"):
        # renders the same prompt; anything else is an error on a server without automatic tool choice
        members["tool_choice"] = "none"
    if leg.body.get("include_reasoning") is False:
        members["include_reasoning"] = True  # a server with a reasoning parser tells no token ids without
    return members


def _sampling(leg: Leg) -> SamplingBody:
    s = leg.sampling
    return SamplingBody(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        seed=s.seed,
        logit_bias={str(k): v for k, v in s.logit_bias.items()},
    )


def _convert(info: Mapping[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(info, kind)
    except msgspec.ValidationError as error:
        raise EngineFailed(f"the node's answer is not what its protocol says: {error}") from error
