"""Relaying to OpenAI-compatible servers: bytes, statuses, failures, retries, disconnects."""

import asyncio
import json

import pytest
from router_fakes import TEXT, Engine, answer_bytes, answer_json, answer_never, router_before, sse, text_event

pytestmark = pytest.mark.integration

STREAM = {**TEXT, "stream": True}
KINDS = ("prompt", "completion", "prompt_estimated", "completion_estimated")
GOOD = b": note\r\n\r\n" + sse(text_event("h\u00e9"), text_event(' "x" \n\n data:'), text_event("", "stop"))
DOCUMENT = {"object": "text_completion", "choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2}, "odd": [1.0, 1e5]}  # fmt: skip


def document_answer():
    return answer_json(DOCUMENT)


async def test_a_stream_passes_byte_for_byte_whatever_the_chunking():
    engine = Engine(None)
    async with router_before({"relay": [engine]}) as running:
        for cuts in ([], list(range(1, len(GOOD), 7)), list(range(1, len(GOOD)))):
            engine.answer = answer_bytes(GOOD, cuts=cuts)
            status, body, headers = await running.post(STREAM)
            assert status == 200
            assert body == GOOD
            assert headers["content-type"] == "text/event-stream"
        record = await running.record()
        assert record["outcome"] == "ok"
        assert record["ttft_ms"] is not None


async def test_the_first_event_leaves_before_the_last_arrives():
    release = asyncio.Event()

    async def answer(request):
        from aiohttp import web

        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        await reply.write(sse(text_event("first"), done=False))
        await release.wait()
        await reply.write(sse(text_event("", "stop")))
        return reply

    async with (
        router_before({"relay": [Engine(answer)]}) as running,
        running.http.post(running.url + "/v1/completions", json=STREAM) as reply,
    ):
        assert b"first" in await reply.content.readany()
        release.set()
        assert (await reply.read()).endswith(b"data: [DONE]\n\n")


async def test_a_document_passes_byte_for_byte_and_the_clients_bytes_reach_the_engine():
    raw = json.dumps(DOCUMENT, indent=3).encode()
    engine = Engine(answer_bytes(raw, content_type="application/json", headers={"x-engine": "1", "x-pdhub-node": "no"}))
    sent = b'{ "model":"m",\n "prompt":"\\u00e9", "max_tokens": 4, "unknown": {"a": [1.50]} }'
    async with router_before({"relay": [engine]}) as running:
        status, body, headers = await running.post(
            sent, **{"X-Request-Id": "my id\t1", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
                     "x-pdhub-node": "evil", "authorization": "Bearer client-key"},
        )  # fmt: skip
        assert (status, body) == (200, raw)
        assert headers["x-engine"] == "1"
        assert headers["x-pdhub-node"] == "relay-0"
        assert headers["x-request-id"] == "myid1"
        path, got, received = engine.seen[-1]
        assert received == sent
        assert path == "/v1/completions"
        assert "authorization" not in got
        assert "x-pdhub-node" not in got
        assert got["accept-encoding"] == "identity"
        assert got["traceparent"].startswith("00-aaaa")
        record = await running.record()
        assert got["x-request-id"] == record["id"] != "myid1"
        assert record["extra"]["client_request_id"] == "myid1"
        assert (record["prompt_tokens"], record["completion_tokens"]) == (3, 2)


async def test_a_stream_without_usage_is_counted_as_estimated():
    """One of its events may be several tokens, so the number of events is no count of tokens."""
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 40}}
    events = [text_event("two words"), text_event(" and more"), text_event("", "stop")]
    engine = Engine(answer_bytes(sse(*events)))
    async with router_before({"relay": [engine]}) as running:
        await running.post(STREAM)
        record = await running.record()
        assert (record["completion_tokens"], sorted(record["estimated"])) == (2, ["completion_tokens", "prompt_tokens"])
        assert record["prompt_tokens"] > 0
        engine.answer = answer_bytes(sse(*events, usage))
        await running.post(STREAM)
        record = await running.record()
        assert (record["prompt_tokens"], record["completion_tokens"], record["estimated"]) == (3, 40, [])
        engine.answer = answer_json({name: value for name, value in DOCUMENT.items() if name != "usage"})
        await running.post(TEXT)
        assert sorted((await running.record())["estimated"]) == ["completion_tokens", "prompt_tokens"]
        told = {kind: await running.metric(f'pdhub_router_tokens_total{{kind="{kind}"') for kind in KINDS}
        assert (told["prompt"], told["completion"], told["completion_estimated"]) == (3, 40, 2)
        assert told["prompt_estimated"] > 0


async def test_what_is_estimated_of_a_failed_attempt_is_not_told_of_the_next():
    bad = Engine(answer_bytes(b": nothing\n\n", cut_off=True))
    good = Engine(answer_json(DOCUMENT))
    async with router_before({"relay": [bad, good]}) as running:
        for _ in range(4):
            await running.post(TEXT)
            record = await running.record()
            assert (record["outcome"], record["prompt_tokens"], record["estimated"]) == ("ok", 3, [])


async def test_an_alias_is_mapped_both_ways():
    event = {**text_event('say "model":"there"', "stop"), "model": "there"}
    engine = Engine(answer_bytes(sse(event)), cards=[{"id": "there"}])
    async with router_before({"relay": [engine]}, options={"model": "there", "prefix": "/api"}) as running:
        _, body, _ = await running.post({**STREAM, "model": "alias"})
        assert json.loads(engine.seen[-1][2])["model"] == "there"
        assert engine.seen[-1][0] == "/api/v1/completions"
        assert body == sse({**event, "model": "alias"})


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422])
async def test_a_4xx_passes_verbatim_and_is_neutral(status):
    error = {
        "error": {"message": "odd wording \u00e9", "type": "BadRequestError", "code": status, "extra": 1},
        "more": 2,
    }
    engine = Engine(answer_json(error, status=status))
    async with router_before({"relay": [engine]}, router={"breaker_failures": 1}) as running:
        for body in (TEXT, STREAM):
            got, raw, headers = await running.post(body)
            assert got == status
            assert raw == json.dumps(error).encode()
            assert headers["content-type"].startswith("application/json")
        assert len(engine.seen) == 2, "a client's mistake is not retried"
        assert (await running.record())["outcome"] == "client_error"


@pytest.mark.parametrize("status", [401, 403, 302, 500, 502, 503, 204])
async def test_other_statuses_are_a_bad_gateway_without_their_text(status):
    engine = Engine(
        answer_json({"error": {"message": "secret at 10.0.0.1"}}, status=status, headers={"location": "/x"})
    )
    async with router_before({"relay": [engine]}) as running:
        got, raw, _ = await running.post(TEXT)
        assert got == 502
        assert json.loads(raw)["error"]["code"] == "engine_failed"
        assert b"secret" not in raw
        assert all(path == "/v1/completions" for path, _, _ in engine.seen), "no redirect was followed"


@pytest.mark.parametrize(
    ("raw", "kind"),
    [(b"<html>", "text/html"), (b"[1]", "application/json"), (b"{", "application/json"), (b"", "application/json")],
)
async def test_a_reply_that_is_no_document_is_a_bad_gateway(raw, kind):
    async with router_before({"relay": [Engine(answer_bytes(raw, content_type=kind))]}) as running:
        for body in (TEXT, STREAM):
            status, got, _ = await running.post(body)
            assert status == 502
            assert json.loads(got)["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("error", "status"),
    [({"message": "too long", "type": "BadRequestError", "code": 400}, 400), ({"message": "boom", "code": 500}, 502)],
)
async def test_an_error_as_first_event_becomes_a_status(error, status):
    engine = Engine(answer_bytes(b": ping\n\n" + sse({"error": error})))
    async with router_before({"relay": [engine]}) as running:
        got, raw, headers = await running.post(STREAM)
        assert got == status
        assert headers["content-type"] == "application/json"
        assert ("too long" in raw.decode()) == (status == 400)
        engine.answer = answer_json({"error": error})
        assert (await running.post(TEXT))[0] == status


async def test_a_stream_that_breaks_off_gets_one_error_event_on_a_fresh_line():
    whole = sse(text_event("a"), text_event("b"), done=False)
    torn = whole + b'data: {"choices": [{"te'
    for cut_off in (True, False):
        engine = Engine(answer_bytes(torn, cut_off=cut_off, pause=0.05))
        async with router_before({"relay": [engine]}, router={"breaker_failures": 1}) as running:
            status, body, _ = await running.post(STREAM)
            assert status == 200
            assert body.startswith(whole)
            tail = body[len(whole) :]
            assert tail.startswith(b'data: {"error":')
            assert tail.endswith(b"}\n\n")
            assert tail.count(b"data:") == 1, "exactly one terminal event"
            assert (await running.record())["outcome"] == "error"
            assert await running.metric('pdhub_router_endpoint_usable{endpoint="relay-0"}') == 0, "counted as failure"
            await running.idle()


async def test_an_error_inside_a_stream_is_told_once():
    engine = Engine(answer_bytes(sse(text_event("a"), {"error": {"message": "oom at 10.0.0.1", "code": 500}})))
    async with router_before({"relay": [engine]}) as running:
        _, body, _ = await running.post(STREAM)
        assert body.count(b'"error"') == 1
        assert b"10.0.0.1" not in body
        assert b"[DONE]" not in body


async def test_a_silent_engine_is_bounded():
    engine = Engine(answer_never)
    router = {"first_byte_timeout_s": 0.3, "idle_timeout_s": 0.3, "retries": 0}
    async with router_before({"relay": [engine]}, router=router) as running:
        status, raw, _ = await running.post(TEXT)
        assert status == 504
        assert json.loads(raw)["error"]["code"] == "upstream_timeout"
        engine.answer = answer_bytes(sse(text_event("a"), text_event("b"), done=False), pause=5, cuts=[30])
        status, raw, _ = await running.post(STREAM)
        assert b"upstream_timeout" in raw
        await running.idle()
        async with asyncio.timeout(3):
            while engine.left < 2:  # both connections were closed
                await asyncio.sleep(0.01)


async def test_the_whole_request_is_bounded():
    engine = Engine(answer_bytes(sse(text_event("a"), *[text_event("b")] * 200), cuts=range(20, 9000, 40), pause=0.05))
    async with router_before({"relay": [engine]}, router={"total_timeout_s": 0.5}) as running:
        _, raw, _ = await running.post(STREAM)
        assert b"request_timeout" in raw
        await running.idle()


async def test_a_dead_engine_is_replaced_before_the_first_byte():
    dead, alive = Engine(document_answer()), Engine(document_answer())
    async with router_before({"relay": [dead, alive]}, router={"probe_interval_s": 30}) as running:
        await dead.close()
        for _ in range(3):
            status, _, headers = await running.post(TEXT)
            assert (status, headers["x-pdhub-node"]) == (200, "relay-1")
        assert await running.metric("pdhub_router_retries_total{") >= 1
        assert running.router.context.records[0].attempts == 2


@pytest.mark.parametrize("failure", ["500", "first-error", "cut", "html"])
async def test_a_retry_goes_elsewhere_and_nothing_is_sent_twice(failure):
    scripts = {
        "500": answer_json({"error": {}}, status=500),
        "first-error": answer_bytes(sse({"error": {"message": "x", "code": 500}})),
        "cut": answer_bytes(b": hello\n\n", cut_off=True),
        "html": answer_bytes(b"<html>", content_type="text/html"),
    }
    bad, good = Engine(scripts[failure]), Engine(answer_bytes(GOOD))
    async with router_before({"relay": [bad, good]}) as running:
        status, body, _ = await running.post(STREAM)
        assert (status, body) == (200, GOOD)
        assert len(bad.seen) == len(good.seen) == 1


async def test_a_retry_needs_time_left_and_another_node():
    bad = Engine(answer_json({}, status=500))
    other = Engine(document_answer())
    async with router_before({"relay": [bad, other]}) as running:

        async def slow(request):
            await asyncio.sleep(0.1)
            return await answer_json({}, status=500)(request)

        bad.answer = slow
        status, _, _ = await running.post(TEXT, **{"x-slo-ttft-ms": "50"})
        assert status == 502
        assert other.seen == []
    async with router_before({"relay": [Engine(answer_json({}, status=500))]}, router={"retries": 3}) as running:
        assert (await running.post(TEXT))[0] == 502


async def test_the_breaker_opens_and_one_request_tries_again():
    engine = Engine(answer_json({}, status=500))
    async with router_before({"relay": [engine]}, router={"breaker_failures": 2, "breaker_open_s": 0.3}) as running:
        assert [(await running.post(TEXT))[0] for _ in range(2)] == [502, 502]
        status, _, headers = await running.post(TEXT)
        assert status == 503
        assert headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        assert int(headers["retry-after"]) >= 1
        assert len(engine.seen) == 2
        engine.answer = document_answer()
        await asyncio.sleep(0.35)
        assert (await running.post(TEXT))[0] == 200
        assert (await running.post(TEXT))[0] == 200


async def test_a_busy_engine_is_asked_again_until_the_budget_ends():
    engine = Engine(answer_json({"error": {"message": "busy"}}, status=429, headers={"retry-after": "7"}))
    async with router_before({"relay": [engine]}, admission={"default_budget_s": 0.3}) as running:
        status, _, headers = await running.post(TEXT)
        assert status == 429
        assert headers["retry-after"] == "7"
        assert headers["x-llm-d-request-dropped-reason"] == "rejected-ttl-expired"
        assert len(engine.seen) > 1

        async def later(request):
            engine.answer = document_answer()
            return await answer_json({}, status=429)(request)

        engine.answer = later
        assert (await running.post(TEXT))[0] == 200, "busy is neither a failure nor an open breaker"


async def test_the_queue_is_bounded():
    release = asyncio.Event()

    async def answer(request):
        await release.wait()
        return await document_answer()(request)

    engine = Engine(answer)
    async with router_before({"relay": [engine]}, options={"slots": 1}, admission={"queue_limit": 1}) as running:
        first = asyncio.create_task(running.post(TEXT))
        while not engine.seen:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(running.post(TEXT))
        while await running.metric('pdhub_router_waiting{pool="relay"}') != 1:
            await asyncio.sleep(0.01)
        status, _, headers = await running.post(TEXT)
        assert status == 429
        assert headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        release.set()
        assert [(await task)[0] for task in (first, second)] == [200, 200]
        await running.idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["first byte", "streaming", "queue"])
async def test_a_client_that_leaves_is_noticed(stream, phase):
    answer = answer_never
    if phase == "streaming":
        answer = answer_bytes(sse(*[text_event("a")] * 400), cuts=range(50, 20000, 50), pause=0.02)
    engine = Engine(answer)
    async with router_before({"relay": [engine]}, options={"slots": 1}) as running:
        tasks = [asyncio.create_task(running.post({**TEXT, "stream": stream})) for _ in range(1 + (phase == "queue"))]
        while not engine.seen:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        for task in reversed(tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(2):
            while engine.left == 0:
                await asyncio.sleep(0.01)
        await running.idle()
        assert len(engine.seen) == 1
        assert (await running.record())["outcome"] == "cancelled"


async def test_body_limit_and_paths():
    engine = Engine(document_answer())
    async with router_before({"relay": [engine]}, router={"body_limit_bytes": 2000}) as running:
        status, raw, _ = await running.post({**TEXT, "prompt": "x" * 3_000_000})
        assert status == 413
        assert json.loads(raw)["error"]["code"] == "request_too_large"

        async def endless():
            for _ in range(10_000):
                yield b"x" * 1000

        async with running.http.post(running.url + "/v1/completions", data=endless()) as reply:
            assert reply.status == 413
        for method, path, status in (
            ("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405), ("GET", "/docs", 404),
            ("GET", "/openapi.json", 404), ("GET", "/v1/completions/", 404), ("POST", "/v1/embeddings", 404),
            ("GET", "/v1/models/none", 404),
        ):  # fmt: skip
            async with running.http.request(method, running.url + path) as reply:
                assert reply.status == status, path
                assert set((await reply.json())["error"]) == {"message", "type", "param", "code"}
        assert engine.seen == []


async def test_a_large_body_arrives_whole():
    engine = Engine(document_answer())
    async with router_before({"relay": [engine]}) as running:
        sent = json.dumps({**TEXT, "prompt": "y" * 3_000_000}).encode()
        assert (await running.post(sent))[0] == 200
        assert engine.seen[0][2] == sent


async def test_models_health_and_ready():
    engine = Engine(document_answer(), cards=[{"id": "m", "max_model_len": 77, "permission": ["kept"]}])
    async with router_before({"relay": [engine]}) as running:
        async with running.http.get(running.url + "/v1/models") as reply:
            cards = (await reply.json())["data"]
        assert [c["id"] for c in cards] == ["m", "alias"]
        assert all(c["max_model_len"] == 77 and c["permission"] == ["kept"] for c in cards)
        async with running.http.get(running.url + "/v1/models/alias") as reply:
            assert (await reply.json())["parent"] == "m"
        engine.cards = []
        async with asyncio.timeout(10):
            while True:
                async with running.http.get(running.url + "/ready") as reply:
                    if reply.status == 503:
                        assert "lists no model" in await reply.text()
                        break
                await asyncio.sleep(0.05)
        assert (await running.post(TEXT))[0] == 503
        async with running.http.get(running.url + "/health") as reply:
            assert reply.status == 200


async def test_context_falls_through_to_a_pool_that_is_large_enough():
    small = Engine(document_answer(), cards=[{"id": "m", "max_model_len": 100}])
    large = Engine(document_answer(), cards=[{"id": "m", "max_model_len": 5000}])
    async with router_before({"large": [large], "small": [small]}) as running:
        assert (await running.post(TEXT))[2]["x-pdhub-pool"] == "small"
        status, _, headers = await running.post({**TEXT, "max_tokens": 200})
        assert (status, headers["x-pdhub-pool"], headers["x-pdhub-reason"]) == (200, "large", "fallback")
        status, raw, _ = await running.post({**TEXT, "max_tokens": 6000})
        assert status == 400
        assert json.loads(raw)["error"]["code"] == "context_length_exceeded"
        small.answer = answer_json({"error": {"message": "long", "code": "context_length_exceeded"}}, status=400)
        assert (await running.post(TEXT))[2]["x-pdhub-pool"] == "large"
        large.answer = small.answer
        assert (await running.post(TEXT))[0] == 400


async def test_unknown_models_never_become_labels():
    async with router_before({"relay": [Engine(document_answer())]}) as running:
        for n in range(3):
            assert (await running.post({**TEXT, "model": f"weird-{n}"}))[0] == 404
        async with running.http.get(running.url + "/metrics") as reply:
            text = await reply.text()
        assert "weird" not in text
        assert 'code="model_not_found",outcome="client_error",pool=""} 3.0' in text
