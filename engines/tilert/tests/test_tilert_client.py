"""The calls that the client describes. No server, no router."""

import secrets

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdhub_tilert.abilities import declared
from pdhub_tilert.client import TileRTClient
from pdhub_tilert.config import TileRTConfig
from pdhub_tilert.profiles import KVDtype, Profile, kv_bytes, layout_version

from pdhub.api import (
    AdmissionRejected,
    EngineFailed,
    Feature,
    Freed,
    InvalidRequest,
    Leg,
    LegOrder,
    PrefillResult,
    RequestView,
    Sampling,
    Target,
    TokenLogprob,
    TransferFailed,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ID = "0123456789abcdef" * 2
INFO = {"profile": "glm5", "engine": "MlaNsaEngineAdapter", "capabilities": {"penalties": False, "ignore_eos": True}}


def leg(body=None, *, path=COMPLETIONS, result=None, claim=None, max_tokens=None, logprobs=None, url=None, **sampling):
    return Leg(
        transfer_id=ID,
        request_id="r",
        request=RequestView("r", "m", path, 3, max_tokens=max_tokens, logprobs=logprobs),
        body={"model": "m", "prompt": "x", **(body or {})},
        sampling=Sampling(**sampling),
        decode=Target("t", url or "http://10.0.0.9:5557", INFO),
        prefill=Target("p", "http://10.0.0.7:8100", {}, {"model": "served"}, {}, "prefill"),
        max_total_tokens=10,
        budget_s=12.0,
        claim=claim,
        result=result,
    )


def answered(**options):
    body = {"id": f"cmpl-{ID}", "usage": {"prompt_tokens": 3}, **options.pop("body", {})}
    return PrefillResult(body, **{"prompt_token_ids": (1, 2, 3), "first_token": 7, **options})


def client(**options):
    return TileRTClient(TileRTConfig(**options))


def rid_of(engine_id):
    """How TileRT derives its key from vLLM's ids (its ``derive_rid``, restated)."""
    rid = engine_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
    parts = rid.rsplit("-", 1)
    if len(parts) == 2 and len(parts[1]) <= 8 and all(c in "0123456789abcdef" for c in parts[1]):
        rid = parts[0]
    parts = rid.rsplit("-", 1)
    return parts[0] if len(parts) == 2 and parts[1].isdigit() and len(parts[1]) <= 3 else rid


def test_what_it_declares():
    made = client()
    assert (made.order, made.freed, made.speaks_tokens) == (LegOrder.PREFILL_FIRST, Freed.CANCEL, True)
    assert (made.handovers, made.settle_s, made.fence_s) == (1, 2.0, 120.0)
    assert client(handovers=0).handovers is None
    capabilities = made.capabilities(INFO)
    assert capabilities == declared(TileRTConfig())
    assert (capabilities.slots, capabilities.max_context) == (1, 202_751)
    assert capabilities.features == {Feature.SAMPLING, Feature.TOP_K, Feature.IGNORE_EOS}


@pytest.mark.parametrize(
    ("told", "gained"),
    [
        ({"penalties": True}, {Feature.REPETITION_PENALTY, Feature.PRESENCE_PENALTY}),
        ({"logprobs": True}, {Feature.LOGPROBS}),
        ({"penalties": 1, "logprobs": "yes"}, set()),
        (None, set()),
    ],
)
def test_a_node_can_do_what_it_says(told, gained):
    found = client().capabilities({"profile": "glm5", "capabilities": told}).features
    assert found == {Feature.SAMPLING, Feature.TOP_K} | gained


def test_an_engine_without_top_k_and_another_model_than_configured():
    assert Feature.TOP_K not in client(profile="glm-5.2").capabilities({"profile": "glm5_2"}).features
    with pytest.raises(EngineFailed, match="dsv32"):
        client().capabilities({"profile": "dsv32"})


def test_prefill_is_marked_for_the_connector_and_both_legs_sample_alike():
    made = client()
    call = made.prefill(leg(claim={"status": "idle"}, temperature=0.7, top_p=0.9, top_k=20))
    assert call.headers == {"x-request-id": ID}
    assert call.set["kv_transfer_params"] == {"tilert_host": "10.0.0.9", "tilert_ctrl_port": 5556}
    assert (call.set["model"], call.set["return_token_ids"]) == ("served", True)
    assert "logprobs" not in call.set
    decode = made.decode(leg(result=answered(), temperature=0.7, top_p=0.9, top_k=20)).set
    assert decode["sampling"] == {name: call.set[name] for name in decode["sampling"]}
    assert (decode["rid"], decode["first_token_id"], decode["stream"]) == (ID, 7, True)
    assert (decode["timeout_s"], decode["max_tokens"]) == (12.0, 202_748)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 999), st.sampled_from(["chatcmpl-", "cmpl-"]), st.binary(min_size=16, max_size=16))
def test_its_ids_come_out_of_vllms_as_they_went_in(index, prefix, raw):
    made, tail = raw.hex(), secrets.token_hex(4)
    internal = f"{prefix}{made}-{tail}" if prefix == "chatcmpl-" else f"{prefix}{made}-{index}-{tail}"
    assert rid_of(internal) == rid_of(prefix + made) == made


@pytest.mark.parametrize("told", ["cmpl-other", "", None, "chatcmpl-job-1"])
def test_kv_under_another_id_is_never_waited_for(told):
    with pytest.raises(TransferFailed):
        client().decode(leg(result=answered(body={"id": told})))


def test_a_busy_node_is_seen_before_prefill():
    made = client()
    assert (made.claim(leg()).method, made.claim(leg()).path) == ("GET", "/decode_status")
    with pytest.raises(AdmissionRejected) as refused:
        made.prefill(leg(claim={"status": "busy", "current_rid": "x"}))
    assert refused.value.contended
    with pytest.raises(EngineFailed):
        made.prefill(leg(claim={"status": "odd"}))
    assert made.parse_load({"status": "busy"}).running == 1
    assert made.cancel(leg()) is None
    assert made.cancel(leg(result=answered())).set == {"rid": ID}


def test_values_that_it_would_not_honour_are_declared():
    told = client().capabilities({"profile": "glm5", "capabilities": {"logprobs": True}})
    assert (told.max_top_k, told.max_logprobs, told.logprobs_from) == (255, 5, 0.2)
    bare = client().capabilities({"profile": "glm5", "capabilities": {}})
    assert (bare.max_top_k, bare.max_logprobs, bare.logprobs_from) == (255, 0, 0.0)


def test_the_first_token_by_log_probabilities():
    made = client(first_token="logprobs")
    assert made.prefill(leg()).set["logprobs"] == 1
    assert made.prefill(leg(path=CHAT)).set["top_logprobs"] == 1
    assert made.prefill(leg()).set["return_tokens_as_token_ids"] is True
    assert "return_token_ids" not in made.prefill(leg()).set
    known = answered(prompt_token_ids=(), first_token=None, first_logprob=TokenLogprob(9, -0.5))
    assert made.decode(leg(result=known)).set["first_token_id"] == 9
    for missing in (answered(first_token=None), answered(prompt_token_ids=(), body={"usage": None})):
        with pytest.raises(EngineFailed):
            made.decode(leg(result=missing))


def test_a_prompt_that_fills_the_context_is_refused_by_its_exact_length():
    made = client(max_seq_len=100)
    at_most = answered(prompt_token_ids=tuple(range(98)))
    assert made.decode(leg(result=at_most, max_tokens=50)).set["max_tokens"] == 1
    with pytest.raises(InvalidRequest) as refused:
        made.decode(leg(result=answered(prompt_token_ids=tuple(range(99)))))
    assert refused.value.code == "context_length_exceeded"


def test_where_the_control_port_is():
    wanted = [("10.0.0.9", 5556), ("10.0.0.9", 6000), ("rdma-9", 5556)]
    for options, place in zip(({}, {"ctrl_port": 6000}, {"ctrl_host": "rdma-9"}), wanted, strict=True):
        params = client(**options).prefill(leg()).set["kv_transfer_params"]
        assert (params["tilert_host"], params["tilert_ctrl_port"]) == place


@pytest.mark.parametrize(
    ("profile", "dtype", "each"),
    [("glm5", "fp8_ds_mla", 62_252), ("glm5_2", "bf16", 101_436), ("dsv32", "fp8", 48_068), ("dsv32", "bf16", 78_324)],
)
def test_bytes_and_layout_versions(profile, dtype, each):
    config = TileRTConfig(profile=profile, kv_cache_dtype=dtype)
    assert kv_bytes(config.profile, config.kv_cache_dtype, True, 6400) == 6400 * each
    assert layout_version(Profile.GLM5, KVDtype.FP8, True) == 10
    assert layout_version(Profile.GLM5, KVDtype.FP8, False) == 1010
    assert layout_version(Profile.DSV32, KVDtype.BF16, True) == 51
