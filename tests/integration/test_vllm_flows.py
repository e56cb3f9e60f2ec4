"""The four flows of vLLM through a router, against scripted servers that keep vLLM's rules (no vLLM runs here)."""

import asyncio
import json
import time

import pytest
from aiohttp import web
from vllm_fakes import answer_of, ids_of, world

from pdhub.router.fleet import fits

pytestmark = pytest.mark.integration

FLOWS = ("nixl", "nixl_push", "mooncake")
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "what is it?"}]


def events_of(body):
    return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("handoff", FLOWS)
async def test_text_is_that_of_one_server_whatever_the_shape(handoff):
    async with world(handoff) as w:
        for length in (1, 3, 4, 5, 8, 33):
            prompt = "x" * length
            status, body, headers = await w.ask(prompt=prompt, max_tokens=6)
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, answer_of(prompt.encode(), 6)), body
            assert headers["x-pdhub-prefill"] == "p0"
        status, body, _ = await w.ask(prompt=[1, 2, 3], max_tokens=5)
        assert json.loads(body)["choices"][0]["text"] == answer_of([1, 2, 3], 5)
        status, body, _ = await w.ask(CHAT, messages=MESSAGES, max_completion_tokens=4)
        wanted = answer_of(ids_of({"messages": MESSAGES}, True), 4)
        assert json.loads(body)["choices"][0]["message"]["content"] == wanted
        status, body, _ = await w.ask(CHAT, messages=MESSAGES, max_tokens=4, stream=True)
        assert "".join(e["choices"][0]["delta"]["content"] for e in events_of(body)) == wanted
        assert body.startswith(b": ping\n\n")
        assert body.endswith(b"data: [DONE]\n\n")
        assert not w.deaths
        assert len({h["x-request-id"] for h in w.prefill.headers}) == len(w.prefill.headers)
        await w.running.idle()


async def test_pull_sends_what_prefill_answered_and_the_ids_of_the_prompt():
    async with world("nixl") as w:
        w.prefill.cached = 3
        status, _, _ = await w.ask(CHAT, messages=MESSAGES, max_tokens=4, top_logprobs=2, logprobs=True)
        assert status == 200
        first, second = w.prefill.bodies[-1], w.decode.bodies[-1]
        assert first["kv_transfer_params"] == {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
            "remote_host": None, "remote_port": None,
        }  # fmt: skip
        assert (first["max_tokens"], first["stream"], first["return_token_ids"]) == (1, False, True)
        assert not {"logprobs", "top_logprobs"} & first.keys()
        params = second["kv_transfer_params"]
        prompt = ids_of({"messages": MESSAGES}, True)
        assert params.pop("prompt_token_ids") == prompt
        assert params.pop("remote_prefill_cached_tokens") == 3
        assert params["remote_engine_id"] == w.prefill.engine_id()
        assert params["remote_num_tokens"] == len(prompt)
        assert len(params["remote_block_ids"][0]) == 1 + len(prompt) // 4
        assert (second["max_tokens"], second["logprobs"], second["messages"]) == (4, True, MESSAGES)
        await w.ask(prompt="some text", max_tokens=4)
        assert w.decode.bodies[-1]["prompt"] == list(b"some text")


async def test_push_runs_one_leg_after_the_other_until_it_knows_prefill_then_both_at_once():
    async with world("nixl_push") as w:
        await w.ask(prompt="first", max_tokens=4)
        params = w.decode.bodies[-1]["kv_transfer_params"]
        assert params["remote_num_tokens"] == 5
        assert "remote_block_ids" not in params
        w.prefill.computing.clear()
        asking = asyncio.create_task(w.ask(prompt="second", max_tokens=4))
        while len(w.decode.bodies) < 2 or len(w.prefill.bodies) < 2:
            await asyncio.sleep(0.005)
        params, asked = w.decode.bodies[-1]["kv_transfer_params"], w.prefill.bodies[-1]["kv_transfer_params"]
        assert params == {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": w.prefill.engine_id(),
            "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "pp_size": 1,
            "remote_request_id": asked["transfer_id"], "transfer_id": asked["transfer_id"],
        }  # fmt: skip
        assert w.prefill.headers[-1]["x-request-id"] == w.decode.headers[-1]["x-request-id"]
        w.prefill.computing.set()
        _, body, _ = await asking
        assert json.loads(body)["choices"][0]["text"] == answer_of(b"second", 4)


async def test_push_with_configured_coordinates_never_waits_for_an_answer():
    options = {"engine_id": "fixed", "side_channel_host": "10.0.0.9", "side_channel_port": 5700, "tensor_parallel": 2}
    async with world("nixl_push", options=options, engine_id="fixed") as w:
        await w.ask(prompt="first", max_tokens=4)
        params = w.decode.bodies[-1]["kv_transfer_params"]
        assert (params["remote_host"], params["remote_port"], params["tp_size"]) == ("10.0.0.9", 5700, 2)


@pytest.mark.parametrize("handoff", ["nixl_push", "mooncake"])
async def test_data_parallel_ranks_are_pinned_where_decode_must_know_them(handoff):
    options = {"data_parallel": 3, **({"engine_id": "base"} if handoff == "nixl_push" else {})}
    async with world(handoff, options=options, ranks=3, engine_id="base") as w:
        for n in range(12):
            _, body, _ = await w.ask(prompt=f"p{n}", max_tokens=3)
            assert json.loads(body)["choices"][0]["text"] == answer_of(f"p{n}".encode(), 3)
            rank = w.prefill.headers[-1]["x-data-parallel-rank"]
            assert w.decode.bodies[-1]["kv_transfer_params"]["remote_engine_id"] == f"base_dp{rank}"
        assert len({h["x-data-parallel-rank"] for h in w.prefill.headers}) > 1


async def test_mooncake_prefill_ends_by_length_and_a_restarted_instance_is_known_by_its_new_id():
    async with world("mooncake") as w:
        w.prefill.first_is_eos = True
        status, body, _ = await w.ask(prompt="one", max_tokens=4, stop=["z"], stop_token_ids=[5], min_tokens=2)
        assert status == 200, body
        sent = w.prefill.bodies[-1]
        assert sent["ignore_eos"] is True
        assert not {"stop", "stop_token_ids", "min_tokens"} & sent.keys()
        assert w.decode.bodies[-1]["stop"] == ["z"]
        assert "ignore_eos" not in w.decode.bodies[-1]
        w.prefill.restart()
        await asyncio.sleep(0.3)
        status, body, _ = await w.ask(prompt="two", max_tokens=4)
        assert json.loads(body)["choices"][0]["text"] == answer_of(b"two", 4)


async def test_prefill_that_hands_nothing_over_is_a_visible_failure_not_a_silent_recompute():
    async with world("nixl", router={"retries": 0}) as w:
        w.prefill.connector = None
        status, body, _ = await w.ask(prompt="x", max_tokens=4)
        assert (status, json.loads(body)["error"]["code"]) == (502, "transfer_failed")
        assert not w.decode.bodies


@pytest.mark.parametrize("handoff", FLOWS)
async def test_cached_tokens_are_prefills(handoff):
    async with world(handoff) as w:
        w.prefill.cached = 2
        for _ in range(2):
            _, body, _ = await w.ask(prompt="abcdef", max_tokens=4)
            assert json.loads(body)["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
            options = {"include_usage": True}
            _, body, _ = await w.ask(prompt="abcdef", max_tokens=4, stream=True, stream_options=options)
            assert events_of(body)[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("handoff", FLOWS)
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_prompt_logprobs_come_from_prefill_and_never_reach_decode(handoff, path):
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}
    async with world(handoff) as w:
        for _ in range(2):
            status, body, _ = await w.ask(path, max_tokens=3, prompt_logprobs=1, **prompt)
            document = json.loads(body)
            place = document if path == CHAT else document["choices"][0]
            assert place["prompt_logprobs"] == [None, {"98": {"logprob": -0.5, "rank": 1}}]
            assert "prompt_logprobs" not in w.decode.bodies[-1]
        status, body, _ = await w.ask(path, max_tokens=3, prompt_logprobs=1, stream=True, **prompt)
        assert (status, b"prompt_logprobs" in body) == (400, True)
        assert len(w.prefill.bodies) == 2
        assert not w.deaths


async def test_what_two_legs_cannot_do_goes_to_the_aggregated_pool():
    async with world("nixl", single=True) as w:
        for members in ({"n": 2}, {"echo": True}, {"best_of": 2}, {"use_beam_search": True}, {"prompt": ["a", "b"]}):
            status, _, headers = await w.ask(**{"prompt": "x", "max_tokens": 2, **members})
            assert (status, headers["x-pdhub-pool"]) == (200, "single"), members
        assert not w.prefill.bodies


async def test_a_forced_tool_call_is_not_forced_on_prefill_and_needs_no_automatic_choice_there():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    async with world("nixl") as w:
        status, body, _ = await w.ask(CHAT, messages=MESSAGES, tools=tools, tool_choice="required", max_tokens=4)
        assert status == 200, body
        assert w.prefill.bodies[-1]["tool_choice"] == "none"
        assert w.prefill.bodies[-1]["tools"] == tools
        assert w.decode.bodies[-1]["tool_choice"] == "required"


async def test_an_alias_reaches_both_legs_as_the_models_name_and_comes_back_as_the_client_wrote_it():
    async with world("nixl") as w:
        _, body, _ = await w.running.post({"model": "alias", "prompt": "x", "max_tokens": 2, "odd": {"a": [1.50]}})
        assert json.loads(body)["model"] == "alias"
        assert {b["model"] for b in (w.prefill.bodies[-1], w.decode.bodies[-1])} == {"m"}
        assert w.decode.bodies[-1]["odd"] == {"a": [1.5]}


async def test_the_load_is_read_and_what_is_missing_is_said_once_and_unknown(caplog):
    async with world("nixl") as w:
        node = w.running.router.context.fleet.pools["split"].nodes["d0"]
        assert (node.load.running, node.load.waiting, node.load.kv_usage) == (2, 1, 0.25)
        w.decode.metrics = "vllm:num_requests_running 1\n"
        while node.load.waiting is not None:
            await asyncio.sleep(0.02)
        assert (node.load.running, node.load.kv_usage) == (1, None)
        await asyncio.sleep(0.3)
        said = [r.message for r in caplog.records if "'d0'" in r.message and "waiting" in r.message]
        assert len(said) == 1
        assert (await w.ask(prompt="x", max_tokens=2))[0] == 200


async def test_a_pool_and_a_prefill_instance_of_other_hand_overs_do_not_fit():
    async with world("nixl") as w:
        fleet = w.running.router.context.fleet
        prefill = fleet.prefills["p0"]
        assert prefill.writes == {"vllm:nixl"}
        assert fits(prefill, frozenset({"vllm:nixl"}))
        assert not fits(prefill, frozenset({"vllm:nixl_push"}))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("handoff", ["nixl_push", "mooncake"])
async def test_prefill_that_fails_ends_the_waiting_decode_leg(handoff, stream):
    async with world(handoff, options={"engine_id": "e"}, engine_id="e", router={"retries": 0}) as w:

        async def broken(request):
            await asyncio.sleep(0.1)
            request.transport.abort()

        w.prefill.script = broken
        started = time.monotonic()
        status, body, _ = await w.ask(prompt="x", max_tokens=4, stream=stream)
        assert (status, time.monotonic() - started < 2) == (502, True), body
        for _ in range(100):
            if w.decode.left:
                break
            await asyncio.sleep(0.02)
        assert w.decode.left == 1
        w.prefill.script = None
        await asyncio.sleep(0.2)
        assert (await w.ask(prompt="y", max_tokens=4))[0] == 200
        await w.running.idle()


@pytest.mark.parametrize("handoff", FLOWS)
async def test_prefills_4xx_is_the_clients_verbatim(handoff):
    async with world(handoff, options={"engine_id": "e"}, engine_id="e") as w:
        status, body, _ = await w.ask(prompt="x", max_tokens=4, tools=[{"x": 1}], tool_choice="auto")
        assert status == 400
        assert b"--enable-auto-tool-choice" in body


@pytest.mark.parametrize("handoff", FLOWS)
async def test_decode_that_refuses_ends_the_prefill_leg(handoff):
    async with world(handoff, options={"engine_id": "e"}, engine_id="e", router={"retries": 0}) as w:

        async def refuse(request):
            return web.json_response({"error": {"message": "queue full", "code": 503}}, status=503)

        w.decode.script = refuse
        if handoff != "nixl":
            w.prefill.computing.clear()
        status, _, _ = await w.ask(prompt="x", max_tokens=4)
        assert status in (429, 502, 503)
        if handoff != "nixl":
            for _ in range(100):
                if w.prefill.left:
                    break
                await asyncio.sleep(0.02)
            assert w.prefill.left == 1
        await w.running.idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("handoff", FLOWS)
async def test_a_client_that_leaves_ends_both_legs(handoff, stream):
    async with world(handoff, options={"engine_id": "e"}, engine_id="e") as w:
        w.prefill.computing.clear()
        body = {"model": "m", "prompt": "x", "max_tokens": 4, "stream": stream}
        asking = asyncio.create_task(w.running.post(body))
        while not w.prefill.bodies:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        for _ in range(100):
            if w.prefill.left and (handoff == "nixl" or w.decode.left):
                break
            await asyncio.sleep(0.02)
        assert w.prefill.left == 1
        w.prefill.computing.set()
        await w.running.idle()
        assert w.decode.left == (0 if handoff == "nixl" else 1)


@pytest.mark.parametrize("handoff", ["nixl_push", "mooncake"])
async def test_what_decode_waits_for_is_written_after_all_once_prefill_is_idle(handoff):
    """vLLM's push keeps decode's blocks until the write. With Mooncake they are freed by a time-out of its own."""
    async with world(handoff, options={"engine_id": "e"}, engine_id="e") as w:
        w.prefill.computing.clear()
        leaving = asyncio.create_task(w.ask(prompt="x", max_tokens=4))
        while not (w.prefill.bodies and w.decode.bodies):
            await asyncio.sleep(0.01)
        other = asyncio.create_task(w.ask(prompt="y", max_tokens=4))
        while len(w.prefill.bodies) < 2:
            await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        while not w.prefill.left:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(w.prefill.bodies) == 2, "the other one goes first"
        w.prefill.computing.set()
        assert (await other)[0] == 200
        while handoff == "nixl_push" and len(w.prefill.bodies) < 3:
            await asyncio.sleep(0.01)
        await w.running.idle()
        assert w.prefill.bodies[2:] == (w.prefill.bodies[:1] if handoff == "nixl_push" else [])
        assert len({h["x-request-id"] for h in w.prefill.headers}) == 2


@pytest.mark.parametrize("handoff", ["nixl_push", "mooncake"])
async def test_a_prefill_instance_that_dies_after_its_answer_does_not_leave_decode_waiting(handoff):
    async with world(handoff, options={"engine_id": "e"}, engine_id="e", router={"retries": 0}) as w:
        w.prefill.writes = False
        asking = asyncio.create_task(w.ask(prompt="x", max_tokens=4))
        fleet = w.running.router.context.fleet
        while not w.decode.bodies or fleet.prefills["p0"].in_flight:
            await asyncio.sleep(0.01)
        started = time.monotonic()
        await w.prefill.close()
        status, body, _ = await asking
        assert (status, json.loads(body)["error"]["code"]) == (502, "transfer_failed")
        assert time.monotonic() - started < 2
        assert not fleet.prefills["p0"].learned


async def test_a_stream_that_has_not_begun_ends_with_its_prefill_instance_however_late(monkeypatch):
    monkeypatch.setattr("pdhub.router.attempt.WRITTEN_S", 0.0)
    async with world("nixl_push", options={"engine_id": "e"}, engine_id="e", router={"retries": 0}) as w:
        w.prefill.writes = False
        asking = asyncio.create_task(w.ask(prompt="x", max_tokens=4, stream=True))
        fleet = w.running.router.context.fleet
        while not w.decode.bodies or fleet.prefills["p0"].in_flight:
            await asyncio.sleep(0.01)
        await w.prefill.close()
        status, body, _ = await asking
        assert (status, json.loads(body)["error"]["code"]) == (502, "transfer_failed")


async def test_a_server_that_is_gone_is_said_once(caplog):
    async with world("nixl", router={"probe_interval_s": 0.02}) as w:
        endpoint = w.running.router.context.fleet.prefills["p0"]
        await w.prefill.close()
        while endpoint._misses < 5:
            await asyncio.sleep(0.02)
        said = [r for r in caplog.records if "'p0'" in r.message and "cannot be reached" in r.message]
        assert len([r for r in said if r.name == "pdhub.router.relay" and r.levelname == "WARNING"]) == 1


@pytest.mark.parametrize("body", [b"<html>nobody here</html>", b'{"detail":"Not Found"}'])
async def test_another_server_at_the_address_is_said_once_with_its_status(caplog, body):
    async with world("nixl", router={"probe_interval_s": 0.02}) as w:
        endpoint = w.running.router.context.fleet.prefills["p0"]
        w.prefill.stranger = body
        while endpoint._misses < 5:
            await asyncio.sleep(0.02)
        said = [r.getMessage() for r in caplog.records if "'p0'" in r.getMessage() and r.levelname == "WARNING"]
        assert said == ["'p0' is not ready: 'p0' answered 404"]


async def test_kv_that_never_comes_ends_a_stream_at_the_hand_overs_deadline():
    sections = {"handoff": {"deadline_s": 0.4}}
    async with world("nixl_push", options={"engine_id": "e"}, engine_id="e", router={"retries": 0}, **sections) as w:
        w.prefill.writes = False
        status, body, _ = await w.ask(prompt="x", max_tokens=4, stream=True)
        assert (status, json.loads(body)["error"]["code"]) == (502, "transfer_failed")
        await w.running.idle()


async def test_push_after_a_restart_learns_again():
    async with world("nixl_push") as w:
        await w.ask(prompt="a", max_tokens=2)
        port = w.prefill.port
        await w.prefill.close()
        prefill = w.running.router.context.fleet.prefills["p0"]
        while prefill.learned:
            await asyncio.sleep(0.02)
        w.prefill.restart()
        await w.prefill.start(port)
        for _ in range(200):
            status, body, _ = await w.ask(prompt="b", max_tokens=4)
            if status == 200:
                break
            await asyncio.sleep(0.02)
        assert json.loads(body)["choices"][0]["text"] == answer_of(b"b", 4)
        assert w.prefill.engine_id() == prefill.learned["rank0"]["remote_engine_id"]


async def leased(w):
    """Hand-overs left to their lease so far, those still there, seconds until the last is freed."""
    return [
        await w.running.metric(f"pdhub_router_{name}")
        for name in ("left_to_lease_total", "leased_handovers", "leased_seconds")
    ]


async def test_kv_that_no_decode_node_fetches_is_counted_until_its_lease_ends():
    async with world("nixl", router={"retries": 0}) as w:
        await w.ask(prompt="x", max_tokens=4)
        assert await leased(w) == [0, 0, 0]
        await w.decode.close()
        status, _, _ = await w.ask(prompt="x", max_tokens=4)
        assert status == 502
        count, still, seconds = await leased(w)
        assert (count, still) == (1, 1)
        assert 25 < seconds <= 30
        leftovers = w.running.router.context.leftovers
        leftovers._clock = lambda: time.monotonic() + 31
        assert await leased(w) == [1, 0, 0]


async def test_kv_that_decode_lets_go_of_is_not_counted():
    async with world("nixl", router={"retries": 0}) as w:

        async def refuse(request):
            return web.json_response({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, status=400)

        w.decode.script = refuse
        status, _, _ = await w.ask(prompt="x", max_tokens=4)
        assert status == 400
        assert await leased(w) == [0, 0, 0]


async def test_load_in_the_headers_of_answers_is_newer_than_the_last_probes_and_stays_inside():
    async with world("nixl", options={"orca": True}, router={"probe_interval_s": 60}) as w:
        instance = w.running.router.context.fleet.prefills["p0"]
        assert (instance.load.waiting, instance.load.kv_usage) == (1, 0.25)
        seen = []

        async def answer(request):
            body = json.loads(await request.read())
            reply = await w.prefill._answer(request, body, False)
            seen.append(request.headers.get("endpoint-load-metrics-format"))
            reply.headers["endpoint-load-metrics"] = "TEXT named_metrics.num_requests_waiting=7.0"
            return reply

        w.prefill.script = answer
        status, _, headers = await w.ask(prompt="x", max_tokens=2)
        assert (status, seen) == (200, ["TEXT"])
        assert (instance.load.waiting, instance.load.running, instance.load.kv_usage) == (7, 2, 0.25)
        assert "endpoint-load-metrics" not in headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given_up", [True, False])
async def test_a_decode_node_that_does_nothing_for_a_lease_is_left_if_prefill_gave_kv_up(monkeypatch, given_up, stream):
    """What it fetches then may be another prompt's. Where prefill has given nothing up, decode renewed the lease."""
    counter = "vllm:nixl_num_kv_expired_reqs_total"
    monkeypatch.setattr("pdhub_vllm.client_nixl.PullClient.default_lease_s", 0.5)
    async with world("nixl", router={"retries": 0, "probe_interval_s": 0.05}) as w:
        instance, going = w.running.router.context.fleet.prefills["p0"], asyncio.Event()
        w.prefill.metrics = f"{counter} 7.0\n"
        while instance.load.expired != 7:
            await asyncio.sleep(0.01)

        async def stuck(request):
            await going.wait()
            return await w.decode._answer(request, json.loads(await request.read()), chat=False)

        w.decode.script = stuck
        asking = asyncio.create_task(w.ask(prompt="x", max_tokens=4, stream=stream))
        while not w.decode.bodies:
            await asyncio.sleep(0.01)
        w.prefill.metrics = f"{counter} {8 if given_up else 7}.0\n"
        if given_up:
            status, body, _ = await asking
            assert (status, json.loads(body)["error"]["code"]) == (504, "lease_expired")
        await asyncio.wait([asking], timeout=1.2)
        going.set()
        assert given_up or (await asking)[0] == 200
