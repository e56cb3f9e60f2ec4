"""What goes wrong at a node, in every phase: the right error, and nothing leaks."""

import asyncio
import json

import aiohttp
import pytest
from node_world import MEMORY, PROMPT, World, plan_for, tokens_of, world

from pdhub.api import ConfigError, EngineFailed, EngineSpec, Finished, FinishReason, InvalidRequest, TransferFailed
from pdhub.testing import toy
from pdhub.testing.memory import MemoryTransport
from pdhub.wire import control

pytestmark = pytest.mark.integration


def engine_spec(runtime):
    return EngineSpec(name="toy", summary="For one test.", config=toy.ToyConfig, runtime=runtime)


# -- refusals before any KV --


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"fingerprint": "0" * 32}, 502, "layout_mismatch"),
        ({"tokens": 0}, 400, "invalid_request"),
        ({"tokens": "many"}, 400, "invalid_request"),
        ({"tokens": 1e400}, 400, "invalid_request"),
        ({"max_tokens": -1}, 400, "invalid_request"),
        ({"max_tokens": 512}, 400, "context_length_exceeded"),
        ({"ttl_s": 0}, 400, "invalid_request"),
        ({"transfer_id": ""}, 400, "invalid_request"),
        ({"transfer_id": "x" * 129}, 400, "invalid_request"),
        ({"transfer_id": None}, 400, "invalid_request"),
    ],
)
async def test_bad_claims(change, status, code):
    async with world() as w:
        got, error = (
            await w.claim(**({"tid": "t"} | change))
            if "transfer_id" not in change
            else await w.post(
                "/claim",
                {"request_id": "r", "tokens": 5, "max_tokens": 5, "fingerprint": w.layout.fingerprint, **change},
            )
        )
        error = error.get("error", error)
        assert (got, error["code"]) == (status, code)
        await w.until_free()


@pytest.mark.parametrize("path", ["/claim", "/decode", "/cancel"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"transfer_id":'])
async def test_what_is_not_json_is_a_400(path, body):
    async with world() as w:
        status, reply = await w.post(path, body)
        assert status == 400
        assert reply["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_too_large_is_refused():
    async with world() as w:
        status, reply = await w.post("/claim", b" " * 100_000)
        assert (status, reply["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"max_tokens": True},
        {"max_tokens": "8"},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [1, -2]},
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": list(PROMPT[:-1])},
        {"max_tokens": 9},
        {"first_token": -1},
        {"min_tokens": -1},
        {"logprobs": -1},
        {"logprobs": 3},
        {"wait_s": 0},
        {"sampling": {"temperature": 1.0, "top_k": 5}},
        {"sampling": {"logit_bias": {"x": 1.0}}},
        {"sampling": {"logit_bias": {"5": 1.0}}},
        {"stop_token_ids": [-1]},
    ],
)
async def test_bad_decodes_are_400_and_leak_nothing(change):
    async with world() as w:
        claim = await w.handed_over("t")
        body = w.decode_body(claim) | change
        status, reply = await w.post("/decode", body)
        assert status == 400, reply
        await w.cancel("t")
        await w.until_free()


async def test_a_claim_comes_once():
    async with world() as w:
        claim = await w.handed_over("t")
        assert (await w.claim("t"))[0] == 400
        assert tokens_of(await w.decode(claim)) == w.expected()
        status, error = await w.claim("t")
        assert (status, error["code"]) == (400, "duplicate_transfer")
        await w.until_free()


async def test_a_full_node_is_contended_and_serves_again():
    async with world() as w:
        claims = [await w.claim(f"t{i}") for i in range(3)]
        status, error = claims[2]
        assert (status, error["code"]) == (429, "admission_rejected")
        await w.cancel("t0")
        assert not isinstance(await w.claim("t3"), tuple)
        for tid in ("t1", "t3"):
            await w.cancel(tid)
        await w.until_free()


# -- refused joins --


async def test_joins_that_are_refused_leave_the_claim_alone():
    async with world() as w:
        claim = await w.claim("t", tokens=8, max_tokens=8)
        sender = await w.sender()
        cases = [
            ({"tokens": 9}, "landing_too_small", 9),
            ({"tokens": 505}, "context_length_exceeded", 505),
            ({"generation": claim.generation - 1}, "stale_generation", 0),
            ({"generation": claim.generation + 1}, "stale_generation", 0),
            ({"writers": 2}, "layout_mismatch", 0),
            ({"rank": 7}, "layout_mismatch", 0),
        ]
        for change, code, need in cases:
            refused = await sender.join(claim, **({"tokens": 8} | change))
            assert isinstance(refused, control.Refused)
            assert (refused.transfer_id, refused.code, refused.need) == ("t", code, need)
        await sender.send(control.Join("other", 1, 0, 1, 8))
        assert (await sender.receive()).code == "unknown_transfer"
        assert (await w.load()).leases == {"claimed": 1}
        accept = await sender.join(claim, tokens=8)
        await asyncio.to_thread(sender.write, accept, PROMPT[:8])
        await sender.done(claim, accept)
        assert tokens_of(await w.decode(claim, PROMPT[:8])) == w.expected(PROMPT[:8])
        await w.until_free()


async def test_an_upper_estimate_over_the_context_still_claims():
    async with world(engine={"max_context": 64}) as w:
        claim = await w.claim("t", tokens=500, max_tokens=8)
        assert claim.capacity_tokens == 56
        refused = await (await w.sender()).join(claim, tokens=57)
        assert refused.code == "context_length_exceeded"
        await w.cancel("t")
        rest = await w.handed_over("rest", max_tokens=0)
        frames = await w.decode(rest, max_tokens=64 - len(PROMPT))
        assert len(tokens_of(frames)) == 64 - len(PROMPT)
        await w.until_free()


# -- cancel in every phase --


async def test_cancel_of_a_claim_frees_it_and_refuses_the_writer():
    async with world() as w:
        claim = await w.claim("t")
        await w.cancel("t")
        await w.cancel("t")
        await w.until_free()
        assert (await (await w.sender()).join(claim)).code == "unknown_transfer"
        status, error = await w.decode(claim)
        assert (status, error["code"]) == (499, "request_cancelled")


async def test_a_cancel_that_overtakes_its_claim_wins():
    async with world() as w:
        await w.cancel("t")
        assert (await w.claim("t"))[0] == 400
        await w.until_free()


@pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
async def test_cancel_while_writing_waits_for_the_writer(transport):
    async with world(transport=transport) as w:
        claim = await w.claim("t")
        sender = await w.sender()
        await sender.join(claim)
        answer = asyncio.create_task(w.decode(claim))
        await asyncio.sleep(0.05)
        await w.cancel("t")
        assert (await answer)[0] == 499
        assert isinstance(await sender.receive(), control.Revoke)
        assert (await w.load()).quarantined == 1
        assert w.node.receiver.engine._landings != {}
        await sender.leave(claim)
        await w.until_free()
        assert "fenced" not in w.names("t")


@pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
async def test_a_writer_that_ignores_the_revoke_is_fenced(transport):
    async with world(transport=transport) as w:
        claim = await w.claim("t")
        sender = await w.sender()
        accept = await sender.join(claim)
        await w.cancel("t")
        await w.until_free()
        assert w.names("t")[-2:] == ["fenced", "released"]
        other = await w.handed_over("u")
        await asyncio.to_thread(_late_write, sender, accept)
        await sender.done(claim, accept)
        assert tokens_of(await w.decode(other)) == w.expected()
        await w.until_free()


def _late_write(sender, accept):
    """A stopped writer resumes: whatever its transport says, no other landing may change."""
    try:
        sender.write(accept, bytes(reversed(PROMPT)))
    except (TransferFailed, KeyError, OSError):
        return


async def test_cancel_of_complete_kv_frees_it():
    async with world() as w:
        claim = await w.handed_over("t")
        await w.until(lambda: "ready" in w.names("t"))
        await w.cancel("t")
        await w.until_free()
        assert (await w.decode(claim))[0] == 499


async def test_cancel_while_waiting_for_a_slot():
    async with world(engine={"token_ms": 50}) as w:
        first, second = await w.handed_over("a"), await w.handed_over("b")
        running = asyncio.create_task(w.decode(first, max_tokens=8))
        await w.until(lambda: "first_token" in w.names("a"))
        waiting = asyncio.create_task(w.decode(second))
        await w.until(lambda: w.node.receiver.slots.waiting == 1)
        await w.cancel("b")
        assert (await waiting)[0] == 499
        assert w.node.receiver.slots.waiting == 0
        assert tokens_of(await running) == w.expected()
        await w.until_free()


async def test_cancel_while_decoding_ends_the_stream_with_an_error_frame():
    async with world(engine={"token_ms": 20}) as w:
        claim = await w.handed_over("t", max_tokens=200)
        answer = asyncio.create_task(w.decode(claim, max_tokens=200))
        await w.until(lambda: "first_token" in w.names("t"))
        await w.cancel("t")
        await w.cancel("t")
        frames = await answer
        assert frames[-1].error.code == "request_cancelled"
        assert not any(f.done for f in frames)
        await w.until_free()


@pytest.mark.parametrize("phase", ["kv", "slot", "tokens"])
async def test_a_dropped_decode_connection_cancels(phase):
    async with world(engine={"token_ms": 20}) as w:
        if phase == "slot":
            blocker = await w.handed_over("a", max_tokens=100)
            running = asyncio.create_task(w.decode(blocker, max_tokens=100))
            await w.until(lambda: "first_token" in w.names("a"))
        claim = await (w.claim("t") if phase == "kv" else w.handed_over("t", max_tokens=200))
        async with aiohttp.ClientSession(w.node.url) as session:
            call = asyncio.create_task(session.post("/decode", json=w.decode_body(claim)))
            if phase == "tokens":
                reply = await call
                await reply.content.readline()
                reply.close()
            else:
                await asyncio.sleep(0.1)
                call.cancel()
        await w.until(lambda: "released" in w.names("t"), "freed")
        if phase == "slot":
            await w.cancel("a")
            await running
        await w.until_free()


async def test_only_the_own_connection_cancels_a_transfer():
    """A second call for a running transfer is refused, and its end is not the end of the first."""
    async with world(engine={"token_ms": 10}) as w:
        claim = await w.handed_over("t", max_tokens=20)
        running = asyncio.create_task(w.decode(claim, max_tokens=20))
        await w.until(lambda: "first_token" in w.names("t"))
        assert (await w.decode(claim, max_tokens=20))[0] == 400
        claim_old = type(claim)(**{f: getattr(claim, f) for f in claim.__struct_fields__} | {"generation": 1})
        assert (await w.decode(claim_old))[0] == 504
        assert tokens_of(await running) == w.expected(max_tokens=20)
        await w.until_free()


async def test_cancels_at_every_moment_leave_nothing():
    async with world(engine={"slots": 2, "token_ms": 1}, landings=3) as w:
        sender = await w.sender()
        lock = asyncio.Lock()

        async def one(i):
            while isinstance(claim := await w.claim(f"t{i}"), tuple):
                assert claim[0] == 429
                await asyncio.sleep(0.01)
            killer = asyncio.get_running_loop().call_later(0.002 * (i % 12), lambda: kills.append(_kill(w, f"t{i}")))
            prompt = PROMPT[: 5 + i]
            async with lock:
                answer = await sender.join(claim, tokens=len(prompt))
                while isinstance(answer, control.Revoke):
                    answer = await sender.receive()
                if isinstance(answer, control.Accept):
                    await asyncio.to_thread(sender.write, answer, prompt)
                    await sender.done(claim, answer)
            await w.decode(claim, prompt)
            killer.cancel()

        kills = []
        await asyncio.gather(*(one(i) for i in range(28)))
        await asyncio.gather(*kills)
        await w.until_free()


def _kill(w, tid):
    return asyncio.create_task(w.cancel(tid))


# -- writers that fail --


async def test_a_writer_that_leaves_fails_the_transfer_at_once():
    async with world() as w:
        claim = await w.claim("t")
        sender = await w.sender()
        await sender.join(claim)
        answer = asyncio.create_task(w.decode(claim))
        await asyncio.sleep(0.05)
        await sender.leave(claim)
        status, error = await answer
        assert (status, error["code"]) == (502, "transfer_failed")
        await w.until_free()
        assert "fenced" not in w.names("t")


@pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
@pytest.mark.parametrize("how", ["cut", "unproven"])
async def test_a_lost_writer_fails_the_transfer_and_is_fenced(transport, how):
    async with world(transport=transport) as w:
        claim = await w.claim("t")
        sender = await w.sender()
        accept = await sender.join(claim)
        await asyncio.to_thread(sender.write, accept)
        answer = asyncio.create_task(w.decode(claim))
        await w.until(lambda: w.node.receiver.table.get("t").expected)
        if how == "cut":
            sender.cut()
        else:
            await sender.leave(claim, stopped=False)
        assert (await answer)[0] == 502
        await w.until_free()
        assert "fenced" in w.names("t")
        assert tokens_of(await w.decode(await w.handed_over("u"))) == w.expected()


async def test_a_connection_that_ends_after_done_costs_nothing():
    async with world() as w:
        sender = await w.sender()
        claim = await w.handed_over("t", sender=sender)
        await w.until(lambda: "ready" in w.names("t"))
        sender.cut()
        await asyncio.sleep(0.05)
        assert tokens_of(await w.decode(claim)) == w.expected()
        await w.until_free()


class Unfenceable(MemoryTransport):
    def fence(self, region_id, within_s):
        return False

    def unregister(self, region_id):
        self.regions.pop(region_id, None)


async def test_a_fence_without_proof_asks_for_a_restart_and_keeps_the_memory(monkeypatch):
    monkeypatch.setattr("pdhub.node.decode.CLOSE_SLACK_S", 0)
    plan = plan_for(handoff={"fence_within_s": 0.1})
    plan.transport = type(plan.transport)(
        type(MEMORY)(name="memory", summary="", factory=lambda config: Unfenceable()), plan.transport.config
    )
    w = await World(plan).open()
    try:
        claim = await w.claim("t")
        sender = await w.sender()
        await sender.join(claim)
        sender.cut()
        await asyncio.wait_for(w.node.restart_wanted.wait(), 10)
        assert "could not be fenced" in w.node.restart_reason
        assert (await w.load()).quarantined == 1
        assert "released" not in w.names("t")
        async with w.http.get("/health") as reply:
            assert reply.status == 503
        status, error = await w.claim("u")
        assert (status, error["code"]) == (503, "draining")
    finally:
        await w.close()


# -- time --


async def test_a_claim_without_a_writer_ends():
    async with world() as w:
        claim = await w.claim("t", ttl_s=0.05)
        status, error = await w.decode(claim)
        assert (status, error["code"]) == (504, "lease_expired")
        await w.until_free()


async def test_kv_that_does_not_arrive_before_the_deadline_ends():
    async with world(handoff={"deadline_s": 0.1}) as w:
        claim = await w.claim("t")
        sender = await w.sender()
        await sender.join(claim)
        assert (await w.decode(claim))[0] == 504
        await w.until_free()
        assert "fenced" in w.names("t")


async def test_kv_that_nobody_wants_ends():
    async with world(handoff={"ready_ttl_s": 0.05}) as w:
        await w.handed_over("t")
        await w.until_free()


async def test_whoever_waits_for_a_slot_is_not_bound_by_the_ready_limit():
    async with world(engine={"token_ms": 30}, handoff={"ready_ttl_s": 0.05}) as w:
        running = asyncio.create_task(w.decode(await w.handed_over("a")))
        await w.until(lambda: "first_token" in w.names("a"))
        second = await w.decode(await w.handed_over("b"))
        assert tokens_of(second) == tokens_of(await running) == w.expected()
        await w.until_free()


async def test_patience_ends_for_kv_and_for_a_slot():
    async with world(engine={"token_ms": 30}) as w:
        claim = await w.claim("t")
        status, error = await w.decode(claim, wait_s=0.05)
        assert (status, error["code"]) == (504, "lease_expired")
        running = asyncio.create_task(w.decode(await w.handed_over("a")))
        await w.until(lambda: "first_token" in w.names("a"))
        status, error = await w.decode(await w.handed_over("b"), wait_s=0.05)
        assert (status, error["code"]) == (429, "admission_rejected")
        assert tokens_of(await running) == w.expected()
        await w.until_free()


# -- engines that fail --


class Broken(toy.ToyEngine):
    fault = ""

    async def inject(self, landing, handoff):
        if self.fault == "inject":
            raise TransferFailed("unusable")
        if self.fault == "inject-bug":
            raise ZeroDivisionError
        await super().inject(landing, handoff)

    async def decode(self, landing, request):
        if self.fault == "refuses":
            raise InvalidRequest("not me", param="seed")
        count = 0
        async for item in super().decode(landing, request):
            count += 1
            if count == 3 and self.fault == "fails":
                raise EngineFailed("out of luck")
            if count == 3 and self.fault == "bug":
                raise ZeroDivisionError("secret")
            if count == 3 and self.fault == "ends":
                return
            yield item
        if self.fault == "goes on":
            yield Finished(FinishReason.STOP, 1)


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("inject", 502, "transfer_failed"),
        ("inject-bug", 502, "engine_failed"),
        ("refuses", 400, "invalid_request"),
        ("fails", 200, "engine_failed"),
        ("bug", 200, "engine_failed"),
        ("ends", 200, "engine_failed"),
        ("goes on", 200, None),
    ],
)
async def test_engine_faults_are_errors_never_text(fault, status, code):
    runtime = type("OneFault", (Broken,), {"fault": fault})
    async with world(spec=engine_spec(runtime)) as w:
        answer = await w.decode(await w.handed_over("t"))
        if status != 200:
            got, error = answer
            assert (got, error["code"]) == (status, code)
        else:
            last = answer[-1]
            assert (last.error.code if last.error else None) == code
            assert sum(1 for f in answer if f.done or f.error) == 1
        assert "secret" not in json.dumps([str(answer)])
        await w.until_free()


class Greedy(toy.ToyEngine):
    """Cannot reserve."""

    error = MemoryError

    def claim(self, request):
        raise self.error("secret")


@pytest.mark.parametrize(("error", "status"), [(MemoryError, 429), (ZeroDivisionError, 502)])
async def test_an_engine_that_cannot_reserve_refuses_the_claim(error, status):
    async with world(spec=engine_spec(type("OneError", (Greedy,), {"error": error}))) as w:
        got, body = await w.claim("t")
        assert got == status
        assert "secret" not in body["message"]
        await w.until_free()


class Deaf(toy.ToyEngine):
    """Does not end its streams."""

    def cancel(self, transfer_id):
        return None


async def test_an_engine_that_does_not_stop_asks_for_a_restart(monkeypatch):
    monkeypatch.setattr("pdhub.node.receiver.STOP_SLACK_S", -0.9)
    async with world(spec=engine_spec(Deaf), engine={"token_ms": 5}) as w:
        claim = await w.handed_over("t", max_tokens=400)
        answer = asyncio.create_task(w.decode(claim, max_tokens=400))
        await w.until(lambda: "first_token" in w.names("t"))
        await w.cancel("t")
        await asyncio.wait_for(w.node.restart_wanted.wait(), 10)
        assert "did not end" in w.node.restart_reason
        await answer


# -- the end --


async def test_drain_finishes_what_runs_and_refuses_what_comes():
    async with world(engine={"token_ms": 10}) as w:
        claim = await w.handed_over("t", max_tokens=20)
        answer = asyncio.create_task(w.decode(claim, max_tokens=20))
        waiting = await w.claim("u")
        await w.until(lambda: "first_token" in w.names("t"))
        drained = asyncio.create_task(w.node.drain(10))
        await asyncio.sleep(0.02)
        assert (await w.claim("v"))[1]["code"] == "draining"
        async with w.http.get("/health") as reply:
            assert (reply.status, await reply.json()) == (503, {"status": "draining"})
        sender = await w.sender()
        accept = await sender.join(waiting)
        await asyncio.to_thread(sender.write, accept)
        await sender.done(waiting, accept)
        assert tokens_of(await w.decode(waiting)) == w.expected()
        assert tokens_of(await answer) == w.expected(max_tokens=20)
        await asyncio.wait_for(drained, 10)
        await w.until_free()


async def test_close_ends_streams_with_an_error_and_frees_everything():
    async with world(engine={"token_ms": 20}) as w:
        running = await w.handed_over("t", max_tokens=200)
        answer = asyncio.create_task(w.decode(running, max_tokens=200))
        await w.until(lambda: "first_token" in w.names("t"))
        claim = await w.claim("u")
        await (await w.sender()).join(claim)
        await w.node.drain(0.05)
        await w.node.close()
        await w.node.close()
        frames = await answer
        assert frames[-1].error.code == "engine_failed"
        assert "shutting down" in frames[-1].error.message
        assert len(w.node.receiver.table) == 0
        assert w.node.receiver.engine._landings == {}


async def test_a_node_whose_port_is_taken_says_so_and_closes_what_it_opened():
    async with world() as w:
        port = int(w.node.url.rsplit(":", 1)[1])
        second = World(plan_for(node={"port": port}))
        with pytest.raises(ConfigError, match="cannot listen"):
            await second.node.start()


async def test_biases_of_a_whole_vocabulary_are_no_reason_to_refuse_after_prefill():
    """The router let them in, so what the node says of them is about what it can do, not about their size."""
    async with world() as w:
        claim = await w.handed_over("t")
        body = w.decode_body(claim) | {"sampling": {"logit_bias": {str(n): 1.0 for n in range(30_000)}}}
        status, reply = await w.post("/decode", body)
        assert (status, reply["error"]["param"]) == (400, "logit_bias"), reply
        await w.cancel("t")
        await w.until_free()
