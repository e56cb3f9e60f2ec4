"""The prefill leg of pools of `pdhub node`, where a vLLM server or an embedded instance computes it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdhub.api import Leg, RequestView, Sampling, Target
from pdhub.router.clients.node import NodeClient
from pdhub.wire.http import CapabilitiesBody, ClaimReply, HandoffParams, NodeInfo

NODE = msgspec.to_builtins(
    NodeInfo("n", "0", 1, "e", "m", "shm", CapabilitiesBody(max_context=100, slots=1), ["f"], 2, ("h", 1))
)
CLAIM = msgspec.to_builtins(ClaimReply("t", 7, "10.0.0.9", 5, 32, "f", 90))
EMBEDDED = {"fingerprint": "f"}
VLLM = {"data": [{"id": "m"}], "pdhub": {"fingerprint": "f"}}


def leg(
    info: dict[str, Any], config: dict[str, Any] | None = None, sampling: Sampling | None = None, **body: Any
) -> Leg:
    return Leg(
        transfer_id="t",
        request_id="r",
        request=RequestView("r", "m", "/v1/chat/completions", 3),
        body={"model": "m", "messages": [], **body},
        sampling=Sampling(seed=5),
        decode=Target("d", "http://d:1", NODE),
        prefill=Target("p", "http://p:1", info, config or {}, {}, "prefill"),
        max_total_tokens=10,
        budget_s=30.0,
        claim=CLAIM,
    )


@pytest.mark.parametrize("info", [EMBEDDED, VLLM], ids=["embedded", "vllm"])
def test_the_claim_names_the_layout_that_the_instance_writes(info: dict[str, Any]) -> None:
    call = NodeClient().claim(leg(info))
    assert call is not None
    assert call.set["fingerprint"] == "f"


def test_the_sender_learns_what_the_node_would_refuse() -> None:
    call = NodeClient().prefill(leg(VLLM))
    params = msgspec.convert(call.set["kv_transfer_params"]["pdhub"], HandoffParams)
    assert (params.generation, params.host, params.port, params.fingerprint) == (7, "10.0.0.9", 5, "f")
    assert (params.capacity_tokens, params.prompt_limit, params.context) == (32, 90, 100)


def test_vllm_is_told_the_first_tokens_limits_in_its_own_members() -> None:
    call = NodeClient().prefill(leg(VLLM, {"model": "other"}, min_tokens=4, stop_token_ids=[9], tools=[{}]))
    assert call.set["model"] == "other"
    assert (call.set["min_tokens"], call.set["stop_token_ids"]) == (1, [9])
    assert call.set["tool_choice"] == "none"
    plain = NodeClient().prefill(leg(VLLM))
    assert not {"min_tokens", "stop_token_ids", "tool_choice"} & set(plain.set)


def test_a_seed_that_the_host_drew_is_not_vllms() -> None:
    assert "seed" not in NodeClient().prefill(leg(VLLM)).set
    assert NodeClient().prefill(leg(VLLM, seed=5)).set["seed"] == 5
    assert NodeClient().prefill(leg(EMBEDDED)).set["seed"] == 5
