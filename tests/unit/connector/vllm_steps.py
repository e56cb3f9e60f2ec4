"""The few members of vLLM's scheduler output that the ledger reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

PARAMS = {"transfer_id": "t", "generation": 1, "host": "h", "port": 1, "fingerprint": "f"}


def asked(transfer_id: str = "t", **more: Any) -> dict[str, Any]:
    """A router's ``kv_transfer_params``."""
    return {"pdhub": {**PARAMS, "transfer_id": transfer_id, **more}}


def new(req_id: str, blocks: list[int], computed: int = 0) -> Any:
    return SimpleNamespace(req_id=req_id, block_ids=(blocks,), num_computed_tokens=computed)


def output(
    *fresh: Any,
    cached: dict[str, tuple[list[int] | None, int]] | None = None,
    resumed: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
    **scheduled: int,
) -> Any:
    """One step.

    Args:
        cached: id → further blocks and computed tokens. scheduled: tokens of this step by id.
    """
    cached = cached or {}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=list(fresh),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[None if blocks is None else (blocks,) for blocks, _ in cached.values()],
            num_computed_tokens=[computed for _, computed in cached.values()],
            resumed_req_ids=set(resumed),
        ),
        preempted_req_ids=set(preempted) or None,
    )
