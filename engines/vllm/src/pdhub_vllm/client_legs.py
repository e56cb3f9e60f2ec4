"""What the two-legged hand-overs have in common. The keys of ``kv_transfer_params`` are in each hand-over's module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from pdhub.api import Base, Call, Feature, InvalidRequest, Leg, Target
from pdhub_vllm.client import VLLMClient
from pdhub_vllm.config import Handoff

CHAT: Final = "/v1/chat/completions"

PREFILL_DROP: Final = frozenset({"logprobs", "top_logprobs", "logprob_token_ids"})
"""Decode samples the first token itself, and answers for it; prefill's is thrown away."""


class SplitClient(VLLMClient):
    """One request over two servers."""

    handoff: ClassVar[Handoff]
    default_lease_s: ClassVar[float]

    @property
    def lease_s(self) -> float:  # type: ignore[override]
        return self._config.lease_s or self.default_lease_s

    def accepts(self, info: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({f"vllm:{self.handoff}"})

    def writes(self, instance: Target) -> frozenset[str]:
        return self.accepts({}) | super().writes(instance)

    def prefill(self, leg: Leg) -> Call:
        _refuse(leg)
        changes: dict[str, Any] = {**self.renamed(leg), **_no_choice(leg.body), "return_token_ids": True}
        changes |= self.prefill_extra(leg)
        changes["kv_transfer_params"] = self.prefill_params(leg)
        return Call(
            "POST",
            leg.request.endpoint,
            base=Base.PREFILL,
            set=changes,
            drop=PREFILL_DROP,
            headers=self.leg_headers(leg) | self.rank_header(leg) | self.asks(leg.prefill),
        )

    def decode(self, leg: Leg) -> Call:
        params = self.decode_params(leg)
        changes: dict[str, Any] = {}
        if leg.result is not None and leg.result.prompt_token_ids and _plain(leg):
            ids = list(leg.result.prompt_token_ids)
            if leg.request.endpoint == CHAT:
                params["prompt_token_ids"] = ids
            elif isinstance(leg.body.get("prompt"), str):
                changes["prompt"] = ids
        drop = frozenset({"prompt_logprobs"}) if leg.body.get("prompt_logprobs") is not None else frozenset()
        changes["kv_transfer_params"] = params
        return self.relayed(leg, set=changes, drop=drop, headers=self.leg_headers(leg) | self.asks(leg.decode))

    def leg_headers(self, leg: Leg) -> dict[str, str]:
        """Of both legs: an id that no other attempt has. It ends up in both engines' internal request ids."""
        return {"x-request-id": leg.transfer_id}

    def rank_header(self, leg: Leg) -> dict[str, str]:
        """Pins the prefill leg to a data-parallel rank, where decode must know it beforehand."""
        return {}

    def prefill_extra(self, leg: Leg) -> Mapping[str, Any]:
        """Further members of the prefill leg."""
        return {}

    @abstractmethod
    def prefill_params(self, leg: Leg) -> Mapping[str, Any]:
        """``kv_transfer_params`` of the prefill leg."""

    @abstractmethod
    def decode_params(self, leg: Leg) -> dict[str, Any]:
        """``kv_transfer_params`` of the decode leg. Raises TransferFailed."""


def rank_of(leg: Leg) -> int:
    """A data-parallel rank of the instance for this attempt. 0 if it has one."""
    assert leg.prefill is not None
    ranks = int(leg.prefill.config.get("data_parallel", 1))
    return int(leg.transfer_id[:8], 16) % ranks


def has_ranks(leg: Leg) -> bool:
    """The instance's one address stands for several data-parallel ranks."""
    assert leg.prefill is not None
    return int(leg.prefill.config.get("data_parallel", 1)) > 1


def _refuse(leg: Leg) -> None:
    """Whatever the configuration lets through: more than one sequence on one remote request may read freed blocks, and
    what prefill is not told (a tool choice) or does not mind is refused by decode only after prefill was spent."""
    body = leg.body
    for name in ("n", "best_of"):
        if (body.get(name) or 1) > 1:
            raise InvalidRequest(f"{name} must be 1 where prefill and decode are separate", param=name)
    if body.get("use_beam_search"):
        raise InvalidRequest("use_beam_search needs prefill and decode in one server", param="use_beam_search")
    if body.get("echo"):
        raise InvalidRequest("echo needs prefill and decode in one server", param="echo")
    choice = body.get("tool_choice")
    if isinstance(choice, str) and body.get("tools") and choice not in ("none", "auto", "required"):
        raise InvalidRequest("tool_choice must be none, auto, required or a function", param="tool_choice")
    wanted = body.get("prompt_logprobs")
    if wanted and body.get("stream"):
        raise InvalidRequest("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")


def _no_choice(body: Mapping[str, Any]) -> dict[str, str]:
    """A forced tool call of one token is half-made, and vLLM validates it. ``auto`` in its place would be an error on a
    server without automatic tool choice; ``none`` renders the same prompt, tools included."""
    if body.get("tools") and body.get("tool_choice") not in (None, "none", "auto"):
        return {"tool_choice": "none"}
    return {}


def _plain(leg: Leg) -> bool:
    """The prompt is text alone: ids say all of it."""
    return Feature.MULTIMODAL not in leg.request.features and not leg.body.get("echo")
