"""The calls that the clients describe. No server, no router."""

from dataclasses import replace

import pytest
from pdhub_vllm.client import client_of
from pdhub_vllm.config import Handoff, VLLMConfig
from pdhub_vllm.metrics import read_load

from pdhub.api import (
    Base,
    Bind,
    EngineFailed,
    EngineLoad,
    Feature,
    Freed,
    InvalidRequest,
    Leg,
    LegOrder,
    PrefillResult,
    RequestView,
    Sampling,
    Target,
    TransferFailed,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PARAMS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "e",
    "remote_request_id": "cmpl-x-0-00000000", "remote_host": "h", "remote_port": 5600, "tp_size": 2, "dcp_size": 1,
    "pp_size": 1, "remote_num_tokens": 20, "remote_blocks_expiry_time": None, "transfer_mode": "pull", "new": {"a": 1},
}  # fmt: skip


def client(handoff, **options):
    return client_of(VLLMConfig(handoff=handoff, **options))


def leg(body=None, *, path=COMPLETIONS, answer=None, ids=(1, 2, 3), learned=None, info=None, features=(), **prefill):
    body = {"model": "m", "prompt": "x", **(body or {})}
    config = VLLMConfig(**prefill).model_dump(mode="json")
    result = None
    if answer is not None:
        result = PrefillResult(body={"kv_transfer_params": answer}, prompt_token_ids=ids, cached_tokens=None)
    return Leg(
        transfer_id="a" * 32,
        request_id="r",
        request=RequestView("r", "m", path, 3, features=frozenset(features)),
        body=body,
        sampling=Sampling(),
        decode=Target("d", "http://d:1"),
        prefill=Target("p", "http://10.0.0.7:8100", info or {}, config, learned or {}, "prefill"),
        max_total_tokens=10,
        budget_s=30.0,
        result=result,
    )


@pytest.mark.parametrize(
    ("handoff", "order", "bind", "lease_s", "freed"),
    [
        ("nixl", LegOrder.PREFILL_FIRST, Bind.LATE, 30.0, Freed.LEASE),
        ("nixl_push", LegOrder.TOGETHER, Bind.EARLY, 30.0, Freed.LEASE),
        ("mooncake", LegOrder.TOGETHER, Bind.EARLY, 45.0, Freed.LEASE),
        ("none", LegOrder.DECODE_ONLY, Bind.LATE, None, Freed.CLOSE),
    ],
)
def test_what_each_hand_over_declares(handoff, order, bind, lease_s, freed):
    made = client(handoff)
    assert (made.order, made.bind, made.lease_s, made.freed) == (order, bind, lease_s, freed)
    if handoff != "none":
        assert client(handoff, lease_s=7).lease_s == 7
        assert made.accepts({}) == made.writes(Target("p", "http://p:1")) == {f"vllm:{handoff}"}


def test_hand_overs_do_not_accept_each_others():
    written = [client(h).writes(Target("p", "http://p:1")) for h in ("nixl", "nixl_push", "mooncake")]
    assert len(frozenset.union(*written)) == 3


@pytest.mark.parametrize("handoff", ["nixl", "nixl_push"])
def test_the_answer_of_prefill_reaches_decode_verbatim_unknown_members_too(handoff):
    call = client(handoff).decode(leg(answer=PARAMS))
    sent = dict(call.set["kv_transfer_params"])
    if handoff == "nixl_push":
        assert sent.pop("transfer_id") == "a" * 32
        assert sent == {k: v for k, v in PARAMS.items() if k != "remote_block_ids"}
    else:
        assert sent == PARAMS
    assert call.set["prompt"] == [1, 2, 3]
    assert call.base is Base.CLIENT


@pytest.mark.parametrize("handoff", ["nixl", "nixl_push"])
@pytest.mark.parametrize(
    "damage",
    [
        {"remote_engine_id": None}, {"remote_request_id": None}, {"remote_host": None}, {"remote_port": None},
        {"tp_size": None}, {"do_remote_prefill": False}, {"do_remote_prefill": None},
    ],
)  # fmt: skip
def test_what_would_kill_a_decode_engine_is_never_sent(handoff, damage):
    with pytest.raises(TransferFailed):
        client(handoff).decode(leg(answer={**PARAMS, **damage}))


@pytest.mark.parametrize("blocks", [None, [], [[]], (), "x", {"a": 1}])
def test_pull_without_blocks_is_never_sent(blocks):
    with pytest.raises(TransferFailed):
        client("nixl").decode(leg(answer={**PARAMS, "remote_block_ids": blocks}))


@pytest.mark.parametrize("answer", [{}, {"do_remote_prefill": "yes"}])
def test_no_hand_over_no_decode(answer):
    with pytest.raises(TransferFailed):
        client("nixl").decode(leg(answer=answer))


def test_ids_of_a_chat_prompt_travel_in_the_params_but_not_beside_media():
    body = {"messages": [{"role": "user", "content": "x"}]}
    call = client("nixl").decode(leg(body, path=CHAT, answer=PARAMS))
    assert call.set["kv_transfer_params"]["prompt_token_ids"] == [1, 2, 3]
    assert "prompt" not in call.set
    call = client("nixl").decode(leg(body, path=CHAT, answer=PARAMS, features={Feature.MULTIMODAL}))
    assert "prompt_token_ids" not in call.set["kv_transfer_params"]


def test_prefills_own_word_about_its_cache_wins_over_usage():
    made = client("nixl")
    asked = leg(answer={**PARAMS, "remote_prefill_cached_tokens": 5})
    assert made.decode(asked).set["kv_transfer_params"]["remote_prefill_cached_tokens"] == 5


def test_push_knows_prefill_by_configuration_or_by_what_was_learned():
    push = client("nixl_push")
    assert push.order_of(leg(handoff="nixl_push")) is LegOrder.PREFILL_FIRST
    configured = leg(handoff="nixl_push", engine_id="E", side_channel_port=5700)
    assert push.order_of(configured) is LegOrder.TOGETHER
    sent = push.decode(configured).set["kv_transfer_params"]
    assert (sent["remote_engine_id"], sent["remote_host"], sent["remote_port"]) == ("E", "10.0.0.7", 5700)
    assert sent["remote_request_id"] == sent["transfer_id"] == "a" * 32
    assert (
        push.prefill(configured).headers["x-request-id"] == push.decode(configured).headers["x-request-id"] == "a" * 32
    )
    learned = push.learn(leg(answer=PARAMS, handoff="nixl_push"))
    later = leg(handoff="nixl_push", learned=learned)
    assert push.order_of(later) is LegOrder.TOGETHER
    assert push.decode(later).set["kv_transfer_params"]["tp_size"] == 2


def test_push_ranks_have_their_own_engine_port_and_memory():
    push = client("nixl_push")
    one = leg(handoff="nixl_push", engine_id="E", data_parallel=4)
    rank = int("aaaaaaaa", 16) % 4
    sent = push.decode(one).set["kv_transfer_params"]
    assert (sent["remote_engine_id"], sent["remote_port"]) == (f"E_dp{rank}", 5600 + rank)
    assert push.prefill(one).headers["x-data-parallel-rank"] == str(rank)
    assert list(push.learn(leg(answer=PARAMS, handoff="nixl_push", data_parallel=4))) == [f"rank{rank}"]


def test_push_learns_nothing_from_an_answer_without_a_hand_over():
    assert client("nixl_push").learn(leg(answer={}, handoff="nixl_push")) == {}


def test_mooncake_needs_the_engine_that_the_bootstrap_server_names():
    made = client("mooncake")
    info = {"data": [{"id": "m", "max_model_len": 9}], "bootstrap": {"0": {"engine_id": "E", "worker_addr": {}}}}
    sent = made.decode(leg(info=info, handoff="mooncake")).set["kv_transfer_params"]
    assert sent == {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "a" * 32,
        "remote_bootstrap_addr": "http://10.0.0.7:8998", "remote_engine_id": "E",
    }  # fmt: skip
    with pytest.raises(TransferFailed):
        made.decode(leg(handoff="mooncake"))
    assert made.capabilities(info).max_context == 9
    with pytest.raises(EngineFailed, match="bootstrap"):
        made.capabilities({**info, "bootstrap": {}})


def test_mooncake_asks_the_bootstrap_server_of_prefill_instances_only():
    made = client("mooncake", bootstrap_port=9000)
    config = VLLMConfig(handoff=Handoff.MOONCAKE, bootstrap_port=9000).model_dump(mode="json")
    call = made.details(Target("p", "http://[::1]:8100", {}, config, {}, "prefill"))["bootstrap"]
    assert (call.origin, call.path) == ("http://[::1]:9000", "/query")
    assert made.details(Target("d", "http://d:1", {}, config)) == {}
    elsewhere = {**config, "bootstrap_url": "http://boot:1"}
    assert made.details(Target("p", "http://p:1", {}, elsewhere, {}, "prefill"))["bootstrap"].origin == "http://boot:1"


@pytest.mark.parametrize("handoff", ["nixl", "nixl_push", "mooncake"])
@pytest.mark.parametrize(
    ("member", "value"),
    [("n", 2), ("best_of", 2), ("use_beam_search", True), ("echo", True)],
)
def test_two_legs_refuse_more_than_one_sequence_whatever_the_configuration_says(handoff, member, value):
    with pytest.raises(InvalidRequest) as caught:
        client(handoff, features=list(Feature)).prefill(leg({member: value}))
    assert caught.value.param == member


def test_a_tool_choice_that_decode_would_refuse_costs_no_prefill():
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(InvalidRequest) as caught:
        client("nixl").prefill(leg({"tools": tools, "tool_choice": "perhaps"}))
    assert caught.value.param == "tool_choice"
    for choice in ("none", "auto", "required", {"type": "function", "function": {"name": "f"}}):
        assert client("nixl").prefill(leg({"tools": tools, "tool_choice": choice})) is not None


def test_the_aggregated_client_changes_nothing():
    call = client("none").decode(leg({"prompt_logprobs": 1, "n": 3}))
    assert (dict(call.set), call.drop, dict(call.headers)) == ({}, frozenset(), {})
    assert client("none").prefill(leg()) is None


def test_a_name_of_the_model_there_is_set_on_both_legs():
    made = client("nixl", model="other")
    assert made.prefill(leg()).set["model"] == made.decode(leg(answer=PARAMS)).set["model"] == "other"
    with pytest.raises(EngineFailed, match="other"):
        made.capabilities({"data": [{"id": "m"}]})


def test_loads_of_ranks_are_added_and_what_is_missing_is_unknown():
    text = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="a b{},c"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="a b{},c"} 3.0\n'
        'vllm:num_requests_running_total{engine="1"} 77\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        'vllm:kv_cache_usage_perc{engine="1"} 7.5e-01\n'
        "vllm:num_requests_waiting NaN\n"
    )
    load = read_load(text)
    assert (load.running, load.waiting, load.kv_usage) == (5, None, 0.75)
    assert read_load('vllm:gpu_cache_usage_perc{engine="0"} 0.1').kv_usage == 0.1
    lost = "vllm:nixl_num_kv_expired_reqs_total"
    assert read_load(f'{lost}{{engine="0"}} 2.0\n{lost}{{engine="1"}} 1.0').expired == 3
    assert load.expired is None
    assert read_load("nonsense\n\x00") == read_load("")


def test_other_sources_of_load_and_what_they_leave_unknown():
    alone = client("none", server_load=True)
    assert alone.load(Target("d", "http://h:1")).path == "/load"
    assert alone.parse_load({"server_load": 3}) == EngineLoad(running=3)
    assert alone.parse_load({"server_load": "3"}) == EngineLoad()
    assert client("none").told_load({"endpoint-load-metrics": "TEXT named_metrics.num_requests_waiting=1"}) is None
    asking = client("nixl", orca=True)
    text = "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=2.0"
    assert asking.told_load({"endpoint-load-metrics": text}) == EngineLoad(waiting=2, kv_usage=0.25)
    assert asking.told_load({"endpoint-load-metrics": "TEXT named_metrics.kv_cache_usage_perc=nan"}) is None
    assert asking.told_load({}) is None


@pytest.mark.parametrize("handoff", ["nixl", "nixl_push", "mooncake", "none"])
def test_each_leg_asks_for_the_header_if_its_server_is_to_tell(handoff):
    made, name = client(handoff), "endpoint-load-metrics-format"
    known = {"bootstrap": {"0": {"engine_id": "e"}}}
    for prefill, decode in ((True, False), (False, True)):
        asked = leg(answer=dict(PARAMS), info=known, orca=prefill)
        asked = replace(asked, decode=Target("d", "http://d:1", config={"orca": decode}))
        assert (name in made.decode(asked).headers) is decode
        if handoff != "none":
            assert (name in made.prefill(asked).headers) is prefill


def test_a_node_has_a_feed_for_each_of_its_caches():
    events = {"d": {"endpoint": "tcp://10.0.0.1:5557", "replay": "tcp://10.0.0.1:5657"}}
    made = client("nixl", kv_events=events, data_parallel=2)
    assert len(made.cache_feeds(Target("d", "http://h:1"))) == 2
    assert list(made.cache_feeds(Target("other", "http://h:1"))) == []
