"""Claim, join, write, done, decode: the whole hand-over at a node, over real sockets."""

import asyncio

import pytest
from node_world import PROMPT, Sender, tokens_of, world

from pdhub.wire import control
from pdhub.wire.http import Frame

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 33])
async def test_the_answer_depends_on_every_byte_and_is_right(transport, length):
    prompt = PROMPT[:length]
    async with world(transport=transport, handoff={"verify": True}) as w:
        claim = await w.handed_over("t", prompt)
        frames = await w.decode(claim, prompt)
        assert tokens_of(frames) == w.expected(prompt)
        assert frames[0].s.kv_bytes == w.layout.landing_bytes(length)
        assert frames[0].s.handoff_ms > 0
        assert frames[-1] == Frame(done=frames[-1].done)
        assert (frames[-1].done.reason, frames[-1].done.n) == ("length", 8)
        assert w.names("t") == ["claimed", "joined", "done", "ready", "slot", "first_token", "finished", "released"]
        await w.until_free()


async def test_decode_may_be_asked_before_the_kv_is_there():
    async with world() as w:
        claim = await w.claim("t")
        answer = asyncio.create_task(w.decode(claim))
        sender = await w.sender()
        accept = await sender.join(claim)
        await asyncio.sleep(0.05)
        assert not answer.done()
        await asyncio.to_thread(sender.write, accept)
        await sender.done(claim, accept)
        assert tokens_of(await answer) == w.expected()
        await w.until_free()


async def test_a_batch_1_node_receives_the_next_kv_while_it_decodes():
    async with world(engine={"slots": 1, "token_ms": 20}) as w:
        first = await w.handed_over("a")
        running = asyncio.create_task(w.decode(first))
        await w.until(lambda: "first_token" in w.names("a"), "a decodes")
        second = await w.handed_over("b")
        await w.until(lambda: "ready" in w.names("b"), "b arrived")
        assert "finished" not in w.names("a")
        waiting = asyncio.create_task(w.decode(second))
        frames = await waiting
        assert tokens_of(frames) == tokens_of(await running) == w.expected()
        assert frames[0].s.wait_ms > 0
        at = {(e.transfer_id, e.name): e.at for e in w.node.events}
        assert at["b", "joined"] < at["b", "ready"] < at["a", "finished"] <= at["b", "slot"]
        await w.until_free()


async def test_eight_at_once_are_answered_each_with_its_own():
    async with world(transport="tcp", engine={"slots": 2}, landings=3, handoff={"verify": True}) as w:
        prompts = [bytes(f"this is prompt number {i} of eight", "ascii") for i in range(8)]
        sender = await w.sender()

        async def one(i):
            while isinstance(
                claim := await w.claim(f"t{i}-{asyncio.get_running_loop().time()}", len(prompts[i])), tuple
            ):
                assert claim[0] == 429
                await asyncio.sleep(0.01)
            own = await w.sender() if i % 2 else sender
            async with lock if own is sender else asyncio.Lock():
                accept = await own.join(claim, tokens=len(prompts[i]))
                await asyncio.to_thread(own.write, accept, prompts[i])
                await own.done(claim, accept)
            assert tokens_of(await w.decode(claim, prompts[i])) == w.expected(prompts[i])

        lock = asyncio.Lock()
        await asyncio.gather(*(one(i) for i in range(8)))
        await w.until_free()


async def test_two_slots_decode_at_once_and_a_third_waits_its_turn():
    async with world(engine={"slots": 2, "token_ms": 10}, landings=4) as w:
        claims = [await w.handed_over(f"t{i}") for i in range(4)]
        answers = await asyncio.gather(*(w.decode(c) for c in claims))
        assert all(tokens_of(a) == w.expected() for a in answers)
        await w.until_free()


async def test_a_flipped_byte_is_noticed_in_verify_mode_and_counted():
    async with world(handoff={"verify": True}) as w:
        sender = await w.sender()
        claim = await w.claim("t")
        accept = await sender.join(claim)
        await asyncio.to_thread(sender.write, accept, PROMPT, True)
        await sender.done(claim, accept)
        status, error = await w.decode(claim)
        assert (status, error["code"]) == (502, "transfer_failed")
        assert "digest" in error["message"]
        async with w.http.get("/metrics") as reply:
            assert 'pdhub_digest_failures_total{node="fast-0"} 1.0' in await reply.text()
        await w.until_free()


async def test_without_verify_a_flipped_byte_changes_the_answer():
    """So that the test above proves something."""
    async with world() as w:
        sender = await w.sender()
        claim = await w.claim("t")
        accept = await sender.join(claim)
        await asyncio.to_thread(sender.write, accept, PROMPT, True)
        await sender.done(claim, accept)
        assert tokens_of(await w.decode(claim))[1:] != w.expected()[1:]


async def test_capabilities_load_health_and_metrics_tell_the_state():
    async with world(engine={"slots": 2}) as w:
        info = await w.info()
        assert info.landings == 3
        assert info.control == w.node.control
        assert info.accepts == [w.layout.fingerprint]
        assert info.capabilities.max_context == 512
        load = await w.load()
        assert (load.landings_free, load.slots_free, load.leases, load.running) == (3, 2, {}, 0)
        await w.claim("t")
        load = await w.load()
        assert (load.landings_free, load.leases) == (2, {"claimed": 1})
        async with w.http.get("/metrics") as reply:
            text = await reply.text()
        assert 'pdhub_leases{node="fast-0",state="claimed"} 1.0' in text
        assert 'pdhub_landings_free{node="fast-0"} 2.0' in text
        async with w.http.get("/health") as reply:
            assert (reply.status, await reply.json()) == (200, {"status": "ok"})
        await w.cancel("t")
        await w.until_free()


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        ({"protocol": 99}, "protocol_mismatch"),
        ({"transport": "pigeon"}, "transport_mismatch"),
        ({"fingerprint": "0" * 32}, "layout_mismatch"),
    ],
)
async def test_a_sender_that_does_not_fit_is_refused_at_hello(hello, code):
    async with world() as w:
        sender = await w.sender(**hello)
        assert isinstance(sender.welcome, control.Refused)
        assert sender.welcome.code == code
        assert await sender.receive() is None


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\0\0\0\x01\xc1",
        b"\0\0\0\0",
        b"\0\0\0\x02\x81\xa1",
        control.encode(control.Join("t", 1, 0, 1, 1)),
        control.encode(control.Welcome("n", "v", "memory", b"")),
    ],
)
async def test_hostile_bytes_close_the_connection_and_nothing_else(garbage):
    async with world() as w:
        host, port = w.node.control
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(garbage)
        assert await _ended(reader)
        writer.close()
        claim = await w.handed_over("t")
        assert tokens_of(await w.decode(claim)) == w.expected()


async def test_hostile_bytes_after_hello_make_the_writer_vanish():
    async with world() as w:
        sender = await w.sender()
        claim = await w.claim("t")
        assert isinstance(await sender.join(claim), control.Accept)
        await sender.send(control.encode(control.Hello(1, "v", "s", "memory", "f")))
        revoke = await sender.receive()
        assert revoke is None or isinstance(revoke, control.Revoke)
        await w.until_free()
        assert "fenced" in w.names("t")


async def test_connections_are_bounded_and_a_silent_one_is_cut():
    async with world() as w:
        w.node._control._limit = 2
        w.node._control._hello_within_s = 0.1
        host, port = w.node.control
        open_ones = [await asyncio.open_connection(host, port) for _ in range(2)]
        await w.until(lambda: w.node._control.connections == 2)
        reader, writer = await asyncio.open_connection(host, port)
        assert await _ended(reader)
        writer.close()
        for reader, writer in open_ones:
            assert await _ended(reader)
            writer.close()
        await w.until(lambda: w.node._control.connections == 0)
        sender = Sender(w)
        w.senders.append(sender)
        await sender.connect()
        assert isinstance(sender.welcome, control.Welcome)


async def _ended(reader):
    try:
        return await asyncio.wait_for(reader.read(), 10) == b""
    except ConnectionResetError:
        return True
