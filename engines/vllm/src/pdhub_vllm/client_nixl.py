"""vLLM's NixlConnector (decode reads) and NixlPushConnector (prefill writes)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from pdhub.api import Bind, Freed, Leg, LegOrder, TransferFailed
from pdhub_vllm.client_legs import SplitClient, has_ranks, rank_of
from pdhub_vllm.config import Handoff

ASK: Final[Mapping[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Of the prefill leg. Only the first is read; the nulls are what every proxy of vLLM sends."""

NEEDED: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
"""Without one of these the decode engine dies or waits for ever."""

COORDINATES: Final = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
"""What an answer tells of the instance, not of the request."""


class PullClient(SplitClient):
    """``nixl``: prefill, then decode with what prefill answered.

    Blocks wait for ``kv_lease_duration``, which decode extends by heartbeats from the moment the request arrives there.
    Decode frees them by a message when it has read them or refuses the request; a decode that is never called does not.
    """

    handoff = Handoff.NIXL
    order = LegOrder.PREFILL_FIRST
    bind = Bind.LATE
    default_lease_s = 30.0
    freed = Freed.LEASE
    lets_go_lost_s = 30.0  # a read from an instance that is gone fails when UCX finds out: 17 s over TCP

    def prefill_params(self, leg: Leg) -> Mapping[str, Any]:
        return ASK

    def decode_params(self, leg: Leg) -> dict[str, Any]:
        params = answered(leg)
        if not _blocks(params.get("remote_block_ids")):
            raise TransferFailed("the prefill instance named no blocks")
        return params


class PushClient(SplitClient):
    """``nixl_push``: both legs at once, paired by their request id. Where prefill's connector is not known yet, they
    follow one another, and prefill's answer tells it.

    Decode does not time out by itself if prefill never writes: the host closes its connection. Even then its blocks
    stay taken until the write has come (prefill pairs it with the request by the id of the prefill call).
    """

    handoff = Handoff.NIXL_PUSH
    order = LegOrder.TOGETHER
    bind = Bind.EARLY
    default_lease_s = 30.0
    freed = Freed.LEASE
    freed_by_write = True

    def order_of(self, leg: Leg) -> LegOrder:
        return LegOrder.TOGETHER if coordinates(leg) is not None else LegOrder.PREFILL_FIRST

    def learn(self, leg: Leg) -> Mapping[str, Any]:
        try:
            params = answered(leg)
        except TransferFailed:
            return {}
        return {f"rank{rank_of(leg)}": {name: params.get(name, 1) for name in COORDINATES}}

    def rank_header(self, leg: Leg) -> dict[str, str]:
        return {"x-data-parallel-rank": str(rank_of(leg))} if has_ranks(leg) else {}

    def prefill_params(self, leg: Leg) -> Mapping[str, Any]:
        return {**ASK, "transfer_id": leg.transfer_id}

    def decode_params(self, leg: Leg) -> dict[str, Any]:
        if leg.result is not None:
            params = answered(leg)
            params.pop("remote_block_ids", None)
            return params | {"transfer_id": leg.transfer_id}
        known = coordinates(leg)
        if known is None:
            raise TransferFailed("the prefill instance's connector is not known")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **known,
            "remote_request_id": leg.transfer_id,
            "transfer_id": leg.transfer_id,
        }


def answered(leg: Leg) -> dict[str, Any]:
    """Prefill's ``kv_transfer_params``, checked and otherwise verbatim. Raises TransferFailed if they are none that a
    decode engine survives: it was aborted, or has no such connector."""
    params = leg.result.body.get("kv_transfer_params") if leg.result is not None else None
    if not isinstance(params, Mapping) or params.get("do_remote_prefill") is not True:
        raise TransferFailed("the prefill instance handed nothing over")
    missing = [name for name in NEEDED if params.get(name) is None]
    if missing:
        raise TransferFailed(f"the prefill instance's answer lacks {', '.join(missing)}")
    out = dict(params)
    assert leg.result is not None
    if leg.result.cached_tokens is not None:
        out.setdefault("remote_prefill_cached_tokens", leg.result.cached_tokens)
    return out


def coordinates(leg: Leg) -> dict[str, Any] | None:
    """Of the rank that this attempt prefills on: learned, else configured, else None."""
    assert leg.prefill is not None
    config, rank = leg.prefill.config, rank_of(leg)
    learned = leg.prefill.learned.get(f"rank{rank}")
    if isinstance(learned, Mapping):
        return dict(learned)
    engine_id = config.get("engine_id")
    if not engine_id:
        return None
    return {
        "remote_engine_id": f"{engine_id}_dp{rank}" if has_ranks(leg) else engine_id,
        "remote_host": config.get("side_channel_host") or urlsplit(leg.prefill.url).hostname,
        "remote_port": int(config.get("side_channel_port", 5600)) + rank,
        "tp_size": int(config.get("tensor_parallel", 1)),
        "pp_size": int(config.get("pipeline_parallel", 1)),
    }


def _blocks(groups: Any) -> bool:
    return isinstance(groups, list) and any(isinstance(group, list) and group for group in groups)
