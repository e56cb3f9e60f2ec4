"""Claims, prefill and decode against scripted nodes: whatever fails, both legs end and every claim is cancelled."""

import asyncio
import json

import pytest
from aiohttp import web
from router_fakes import TEXT, Node, Prefill, answer_json, answer_never, frames, router_before

pytestmark = pytest.mark.integration

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def failing(status, code, **more):
    return answer_json({"error": {"message": "no", "type": "server_error", "code": code, **more}}, status=status)


def decode_answer(raw, *, hang=False, cut_off=False):
    async def answer(request):
        reply = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await reply.prepare(request)
        await reply.write(raw)
        if hang:
            await asyncio.sleep(3600)
        if cut_off:
            await asyncio.sleep(0.05)
            request.transport.abort()
        return reply

    return answer


async def settled(node, count):
    async with asyncio.timeout(5):
        while len(node.cancels) < count:
            await asyncio.sleep(0.01)


async def test_the_legs_carry_what_they_must(tmp_path):
    lines = frames(b"abc").splitlines(keepends=True)
    lines[1:4] = [json.dumps({"t": [t], "lp": [[t, -0.5, [[t, -0.5]]]]}).encode() + b"\n" for t in b"abc"]
    node, prefill = Node(scripts={"/decode": decode_answer(b"".join(lines))}), Prefill()
    async with router_before({"pool": [node]}, [prefill], tmp_path=tmp_path) as running:
        body = {**TEXT, "temperature": 0.5, "min_tokens": 2, "stop_token_ids": [5], "stop": ["zz"], "logprobs": 1}
        status, raw, headers = await running.post(body)
        assert status == 200, raw
        assert json.loads(raw)["choices"][0]["text"] == "abc"
        assert headers["x-pdhub-prefill"] == "prefill-0"
        claim, (_, sent_headers, sent), decode = node.claims[0], prefill.seen[0], node.decodes[0]
        sent = json.loads(sent)
        params = sent["kv_transfer_params"]["pdhub"]
        assert claim["transfer_id"] == params["transfer_id"] == decode["transfer_id"]
        assert claim["max_tokens"] == 4
        assert claim["fingerprint"] == "f"
        assert params["min_tokens"] == 2
        assert params["stop_token_ids"] == [5]
        assert (sent["max_tokens"], sent["stream"], sent["return_token_ids"]) == (1, False, True)
        assert not {"stop", "min_tokens", "stop_token_ids"} & set(sent)
        assert decode["prompt_token_ids"] == [1, 2, 3]
        assert decode["first_token"] == 97
        assert (decode["max_tokens"], decode["min_tokens"], decode["stop_token_ids"]) == (4, 2, [5])
        assert decode["logprobs"] == 1
        assert sent["return_tokens_as_token_ids"] is True
        assert json.loads(raw)["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3
        assert decode["sampling"]["temperature"] == sent["temperature"] == 0.5
        assert decode["sampling"]["seed"] == sent["seed"], "one seed, drawn once"
        assert sent_headers["x-request-id"] == (await running.record())["id"]
        record = await running.record()
        assert (record["kv_bytes"], record["handoff_ms"], record["completion_tokens"]) == (64, 1.5, 3)
        assert node.cancels == [], "nothing to cancel after a whole answer"
        node.scripts.clear()
        await running.post({k: v for k, v in TEXT.items() if k != "max_tokens"})
        assert node.decodes[1]["max_tokens"] == 500 - 3, "the rest of the context"
        assert node.claims[1]["max_tokens"] == 0
        assert node.claims[1]["transfer_id"] != node.claims[0]["transfer_id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_alias_and_both_endpoints(tmp_path, stream):
    node, prefill = Node(), Prefill()
    async with router_before({"pool": [node]}, [prefill], tmp_path=tmp_path) as running:
        status, raw, _ = await running.post({**CHAT, "model": "alias", "stream": stream}, "/v1/chat/completions")
        assert status == 200
        assert json.loads(prefill.seen[0][2])["model"] == "m"
        assert b'"model":"alias"' in raw.replace(b": ", b":")
        assert raw.endswith(b"data: [DONE]\n\n") == stream


async def test_a_landing_too_small_is_claimed_again_with_the_exact_size(tmp_path):
    node, prefill = Node(), Prefill()

    async def script(request):
        prefill.script = None
        return await failing(409, "landing_too_small", need=333)(request)

    prefill.script = script
    async with router_before({"pool": [node]}, [prefill], tmp_path=tmp_path, router={"breaker_failures": 1}) as running:
        assert (await running.post(TEXT))[0] == 200
        assert node.claims[1]["tokens"] == 333
        assert node.cancelled == [node.claims[0]["transfer_id"]]
        assert node.decodes[0]["transfer_id"] == node.claims[1]["transfer_id"] != node.claims[0]["transfer_id"]
        assert (await running.record())["attempts"] == 1
        assert await running.metric("pdhub_router_reclaims_total") == 1
        prefill.script = failing(409, "landing_too_small", need=444)
        assert (await running.post(TEXT))[0] >= 500
        await settled(node, 3)


PREFILL_FAILURES = [
    (failing(502, "transfer_failed"), 502, "transfer_failed"),
    (failing(500, "internal_error"), 502, "engine_failed"),
    (failing(502, "layout_mismatch"), 502, "layout_mismatch"),
    (answer_json({"choices": []}), 502, "engine_failed"),
    (answer_json({"choices": [{"token_ids": ["x"]}]}), 502, "engine_failed"),
    (answer_json({"choices": [{}]}), 502, "engine_failed"),
    (answer_json([1]), 502, "engine_failed"),
]


@pytest.mark.parametrize(("script", "status", "code"), PREFILL_FAILURES)
async def test_a_failed_prefill_ends_the_claim_at_once(tmp_path, script, status, code):
    node, prefill = Node(), Prefill(script=script)
    async with router_before({"pool": [node]}, [prefill], tmp_path=tmp_path, router={"retries": 0}) as running:
        got, raw, _ = await running.post(TEXT)
        assert (got, json.loads(raw)["error"]["code"]) == (status, code)
        await settled(node, 1)
        assert node.cancelled == [node.claims[0]["transfer_id"]]
        assert node.decodes == []
        await running.idle()


async def test_a_clients_mistake_found_by_prefill_passes_verbatim_and_is_neutral(tmp_path):
    error = {"error": {"message": "maximum context length is 500 tokens", "code": "context_length_exceeded"}}
    node, prefill = Node(), Prefill(script=answer_json(error, status=400))
    router = {"breaker_failures": 1}
    async with router_before({"pool": [node]}, [prefill], tmp_path=tmp_path, router=router) as running:
        for n in range(3):
            status, raw, _ = await running.post(TEXT)
            assert status == 400
            assert json.loads(raw) == error
            await settled(node, n + 1)
        assert len(prefill.seen) == 3, "not retried, not a failure"


async def test_another_prefill_instance_takes_over(tmp_path):
    node, bad, good = Node(), Prefill(script=failing(500, "internal_error")), Prefill()
    async with router_before({"pool": [node]}, [bad, good], tmp_path=tmp_path) as running:
        running.router.context.fleet.prefills["prefill-1"].pending_tokens = 10_000  # so the other one comes first
        status, _, headers = await running.post(TEXT)
        assert status == 200
        assert headers["x-pdhub-prefill"] == "prefill-1"
        assert len({c["transfer_id"] for c in node.claims}) == 2
        await settled(node, 1)
        assert node.cancelled == [node.claims[0]["transfer_id"]]
        assert await running.metric("pdhub_router_prefill_failures_total{") == 1


DECODE_FAILURES = [
    (failing(502, "transfer_failed"), "transfer_failed"),
    (failing(504, "lease_expired"), "lease_expired"),
    (failing(404, "unknown_transfer"), "transfer_failed"),
    (failing(409, "stale_generation"), "transfer_failed"),
    (decode_answer(b""), "engine_failed"),
    (decode_answer(b"junk\n"), "engine_failed"),
    (decode_answer(frames(b"", error={"message": "x", "code": "transfer_failed"})), "transfer_failed"),
    (decode_answer(frames(b"", end=False), cut_off=True), "engine_failed"),
]


@pytest.mark.parametrize(("script", "code"), DECODE_FAILURES)
async def test_a_decode_that_fails_before_the_first_token_moves_on(tmp_path, script, code):
    bad, good, prefill = Node(scripts={"/decode": script}), Node(), Prefill()
    async with router_before({"pool": [bad, good]}, [prefill], tmp_path=tmp_path) as running:
        for stream in (False, True):
            status, raw, headers = await running.post({**TEXT, "stream": stream})
            assert status == 200, raw
            assert headers["x-pdhub-node"] == "pool-1"
        await settled(bad, 1)
        assert set(bad.cancelled) == {c["transfer_id"] for c in bad.claims}
        assert good.cancels == []
        await running.idle()
    alone = Node(scripts={"/decode": script})
    async with router_before({"pool": [alone]}, [Prefill()], tmp_path=tmp_path) as running:
        status, raw, _ = await running.post({**TEXT, "stream": True})
        assert status in (502, 504)
        assert json.loads(raw)["error"]["code"] == code
        await settled(alone, 1)


async def test_a_decode_that_fails_later_is_one_error_event(tmp_path):
    scripts = {
        "cut": decode_answer(frames(b"ab", end=False), cut_off=True),
        "short": decode_answer(frames(b"ab", end=False)),
        "frame": decode_answer(frames(b"ab", error={"message": "gone", "code": "lease_expired"})),
    }
    for name, script in scripts.items():
        node, other = Node(scripts={"/decode": script}), Node()
        async with router_before({"pool": [node, other]}, [Prefill()], tmp_path=tmp_path) as running:
            status, raw, _ = await running.post({**TEXT, "stream": True})
            if name == "frame":  # one piece: the failure is known before anything was sent
                assert status == 200
                continue
            assert status == 200
            assert raw.count(b'data: {"error"') == 1, name
            assert raw.endswith(b"}\n\n")
            assert b"[DONE]" not in raw
            await settled(node, 1)
            assert other.claims == [], "never repeated tokens"


async def test_a_stop_string_cancels_the_node(tmp_path):
    node = Node(scripts={"/decode": decode_answer(frames(b"abcdef", end=False), hang=True)})
    async with router_before({"pool": [node]}, [Prefill()], tmp_path=tmp_path) as running:
        status, raw, _ = await running.post({**TEXT, "stop": ["cd"], "max_tokens": 100})
        document = json.loads(raw)
        assert status == 200
        assert document["choices"][0]["text"] == "ab"
        assert document["choices"][0]["finish_reason"] == "stop"
        assert document["usage"]["completion_tokens"] == 4
        await settled(node, 1)
        async with asyncio.timeout(2):
            while not node.left:
                await asyncio.sleep(0.01)
        await running.idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["claim", "prefill", "handoff", "streaming"])
async def test_a_client_that_leaves_ends_both_legs(tmp_path, phase, stream):
    node, prefill = Node(), Prefill()
    if phase == "claim":

        async def slow(request):
            await asyncio.sleep(0.4)
            node.scripts.clear()
            return await answer_json(
                {"transfer_id": node.claims[0]["transfer_id"], "generation": 1, "host": "h", "port": 1,
                 "capacity_tokens": 9, "fingerprint": "f"}
            )(request)  # fmt: skip

        node.scripts["/claim"] = slow
    elif phase == "prefill":
        prefill.script = answer_never
    elif phase == "handoff":
        node.scripts["/decode"] = answer_never
    else:
        node.scripts["/decode"] = decode_answer(frames(b"ab", end=False), hang=True)
    async with router_before({"pool": [node]}, [prefill], tmp_path=tmp_path) as running:
        task = asyncio.create_task(running.post({**TEXT, "stream": stream}))
        reached = {"claim": node.claims, "prefill": prefill.seen}.get(phase, node.decodes)
        while not reached:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await settled(node, 1)
        assert node.cancelled == [node.claims[0]["transfer_id"]]
        if phase != "claim":
            async with asyncio.timeout(2):
                while not (node.left or prefill.left):
                    await asyncio.sleep(0.01)
        await running.idle()
        assert (await running.record())["outcome"] == "cancelled"


async def test_a_cancel_call_is_repeated_until_it_is_taken(tmp_path):
    node, prefill = Node(), Prefill(script=failing(500, "internal_error"))

    async def flaky(request):
        if len(node.cancels) >= 2:
            return await answer_json({})(request)
        return await failing(500, "internal_error")(request)

    node.scripts["/cancel"] = flaky
    async with router_before({"pool": [node]}, [prefill], tmp_path=tmp_path, router={"retries": 0}) as running:
        await running.post(TEXT)
        await settled(node, 2)
        async with asyncio.timeout(3):
            while await running.metric('pdhub_router_cancels_total{result="sent"}') != 1:
                await asyncio.sleep(0.02)


async def test_a_busy_node_is_no_failure_and_the_next_one_is_asked(tmp_path):
    busy, free = Node(scripts={"/claim": failing(429, "admission_rejected")}), Node()
    router = {"breaker_failures": 1}
    async with router_before({"pool": [busy, free]}, [Prefill()], tmp_path=tmp_path, router=router) as running:
        for _ in range(3):
            status, _, headers = await running.post(TEXT)
            assert (status, headers["x-pdhub-node"]) == (200, "pool-1")
        assert len(busy.claims) >= 1
        assert busy.cancels == []
        assert await running.metric("pdhub_router_retries_total{") == 0


async def test_all_busy_waits_then_429_and_no_prefill_is_spent(tmp_path):
    node, prefill = Node(scripts={"/claim": failing(429, "admission_rejected")}), Prefill()
    async with router_before(
        {"pool": [node]}, [prefill], tmp_path=tmp_path, admission={"default_budget_s": 0.3}
    ) as running:
        status, _, headers = await running.post(TEXT)
        assert status == 429
        assert "retry-after" in headers
        assert headers["x-llm-d-request-dropped-reason"] == "rejected-ttl-expired"
        assert prefill.seen == []
        task = asyncio.create_task(running.post(TEXT))
        await asyncio.sleep(0.1)
        node.scripts.clear()
        assert (await task)[0] == 200


async def test_a_draining_node_gets_nothing_new(tmp_path):
    leaving, staying = Node(), Node()
    async with router_before({"pool": [leaving, staying]}, [Prefill()], tmp_path=tmp_path) as running:
        leaving.scripts["/claim"] = failing(503, "admission_rejected")
        assert (await running.post(TEXT))[2]["x-pdhub-node"] == "pool-1"
        leaving.scripts["/health"] = answer_json({"status": "draining"}, status=503)
        async with asyncio.timeout(5):
            while running.router.context.fleet.pools["pool"].nodes["pool-0"].health(1e12).value != "draining":
                await asyncio.sleep(0.02)
        claims = len(leaving.claims)
        for _ in range(3):
            assert (await running.post(TEXT))[0] == 200
        assert len(leaving.claims) == claims


async def test_a_pair_without_a_common_layout_is_never_used(tmp_path):
    odd, even = Node(fingerprint="odd"), Node(fingerprint="f")
    prefill = Prefill()
    async with router_before({"odd": [odd], "even": [even]}, [prefill], tmp_path=tmp_path, ready=False) as running:
        async with asyncio.timeout(10):
            while True:
                async with running.http.get(running.url + "/ready") as reply:
                    state = await reply.json()
                if reply.status == 200 and len(state["problems"]) == 1:
                    break
                await asyncio.sleep(0.02)
        assert "layout mismatch" in state["problems"][0]
        status, _, headers = await running.post(TEXT, **{"x-slo-tpot-ms": "1"})
        assert (status, headers["x-pdhub-pool"], headers["x-pdhub-reason"]) == (200, "even", "fallback")
        prefill.fingerprint = "third"
        async with asyncio.timeout(10):
            while (await running.post(TEXT))[0] == 200:
                await asyncio.sleep(0.05)
        before = len(prefill.seen), len(odd.claims) + len(even.claims)
        status, raw, _ = await running.post(TEXT)
        assert (status, json.loads(raw)["error"]["code"]) == (502, "layout_mismatch")
        assert (len(prefill.seen), len(odd.claims) + len(even.claims)) == before
        async with running.http.get(running.url + "/ready") as reply:
            assert reply.status == 503


async def test_a_pair_whose_transfers_fail_is_left_alone_for_a_while(tmp_path):
    node, bad, good = Node(), Prefill(script=failing(502, "transfer_failed")), Prefill()
    router = {"retries": 0, "breaker_open_s": 30}
    async with router_before({"pool": [node]}, [bad, good], tmp_path=tmp_path, router=router) as running:
        statuses = [(await running.post(TEXT))[0] for _ in range(24)]
        # Which of two idle instances a request gets is drawn; the pair is out after its second failure.
        assert (statuses.count(502), statuses.count(200)) == (2, 22)


async def test_no_prefill_is_a_503(tmp_path):
    node, prefill = Node(), Prefill()
    async with router_before({"pool": [node]}, [prefill], tmp_path=tmp_path) as running:
        await prefill.close()
        async with asyncio.timeout(10):
            while (await running.post(TEXT))[0] != 503:
                await asyncio.sleep(0.05)
        _, _, headers = await running.post(TEXT)
        assert headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        await settled(node, len(node.claims))
        await running.idle()


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_stopped_process_is_noticed_by_its_silence(tmp_path, where):
    """The connection stays open, probes go unanswered: what SIGSTOP does."""
    node, prefill = Node(), Prefill()
    router = {"idle_timeout_s": 0.6, "probe_timeout_s": 0.5, "retries": 0, "first_byte_timeout_s": 60}
    async with router_before({"pool": [node]}, [prefill], tmp_path=tmp_path, router=router) as running:
        if where == "prefill":
            prefill.script = answer_never
        else:
            node.scripts["/decode"] = answer_never
        task = asyncio.create_task(running.post({**TEXT, "stream": True}))
        while not (prefill.seen if where == "prefill" else node.claims):
            await asyncio.sleep(0.01)
        if where == "prefill":
            prefill.stopped = True
        else:
            node.scripts.update(dict.fromkeys(("/health", "/capabilities", "/load"), answer_never))
        async with asyncio.timeout(6):
            status, raw, _ = await task
        assert (status, json.loads(raw)["error"]["code"]) == (504, "upstream_timeout")
        await running.idle()
