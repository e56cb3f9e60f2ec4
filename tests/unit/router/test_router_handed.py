"""What a vLLM prefill instance's connector tells, before and after a hand-over."""

from __future__ import annotations

import pytest

from pdhub.api import InvalidRequest, LayoutMismatch, RequestError, TransferFailed
from pdhub.router.errors import LandingTooSmall
from pdhub.router.handed import check_handed, told_by


def answer(code: str, need: object = 0) -> dict[str, object]:
    told = {"transfer_id": "t", "error": {"code": code, "message": "why", "need": need}}
    return {"kv_transfer_params": {"remote_engine_id": "e", "pdhub": told}}


@pytest.mark.parametrize(
    "body",
    [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {"remote_block_ids": [[1]]}},
     {"kv_transfer_params": {"pdhub": {"transfer_id": "t", "tokens": 3}}}, {"kv_transfer_params": "x"}],
    ids=str,
)  # fmt: skip
def test_nothing_is_wrong(body: dict[str, object]) -> None:
    check_handed(body, chat=True)


@pytest.mark.parametrize(
    ("code", "need", "kind"),
    [
        ("landing_too_small", 70, LandingTooSmall),
        ("landing_too_small", "70", TransferFailed),
        ("context_length_exceeded", 0, InvalidRequest),
        ("layout_mismatch", 0, LayoutMismatch),
        ("transfer_failed", 0, TransferFailed),
        ("anything", None, TransferFailed),
    ],
)
def test_what_went_wrong_is_raised(code: str, need: object, kind: type[RequestError]) -> None:
    with pytest.raises(kind) as caught:
        check_handed(answer(code, need), chat=True)
    assert type(caught.value) is kind
    if isinstance(caught.value, LandingTooSmall):
        assert caught.value.need == 70


@pytest.mark.parametrize(("chat", "member"), [(True, "messages"), (False, "prompt")])
def test_a_prompt_that_is_too_long_names_the_member_it_came_in(chat: bool, member: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_handed(answer("context_length_exceeded"), chat)
    assert caught.value.param == member


def test_an_embedded_instance_tells_with_nothing_else_and_a_vllm_server_beside_its_own() -> None:
    assert told_by({"fingerprint": "f"})["fingerprint"] == "f"
    assert told_by({"data": [], "pdhub": {"fingerprint": "g"}})["fingerprint"] == "g"
    assert "fingerprint" not in told_by({"data": [], "pdhub": None})
