from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from pdhub.api import (
    AdmissionRejected,
    ConfigError,
    EngineFailed,
    InvalidRequest,
    KVLayout,
    LayoutMismatch,
    LeaseExpired,
    Order,
    RequestError,
    TransferFailed,
    TransferState,
)
from pdhub.core.digest import landing_digest
from pdhub.sender import LandingTooSmall, Sender, Session
from pdhub.wire.control import Accept, Done, Hello, Join, Leave, Refused, RefusedCode, Revoke, Welcome
from tests.unit.sender.fakenode import FakeNode, HeldTransport, chunks, until

Make = Callable[..., Sender]


@pytest.mark.parametrize("layout", list(Order), indirect=True)
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("max_ops", [0, 1])
def test_a_whole_prompt_arrives_with_its_digest(
    layout: KVLayout, node: FakeNode, make_sender: Make, tokens: int, max_ops: int
) -> None:
    session = make_sender(verify=True, max_ops=max_ops).join(node.params(), tokens)
    for chunk in chunks(layout, tokens, 8):
        session.send(chunk)
    assert session.finish() == session.nbytes == sum(c.nbytes for c in chunks(layout, tokens, 8))
    until(lambda: node.got(Done), "done")
    view = node.landings["t1"].view
    assert view is not None
    assert node.got(Done)[0].digest == landing_digest(view, layout, node.capacity, tokens)
    assert node.got(Join) == [Join("t1", 1, 0, 1, tokens)]
    assert node.got(Hello)[0].fingerprint == layout.fingerprint


def test_without_verify_no_digest_is_sent(layout: KVLayout, node: FakeNode, make_sender: Make) -> None:
    session = make_sender().join(node.params(), 8)
    session.send(chunks(layout, 8, 8)[0])
    session.finish()
    until(lambda: node.got(Done), "done")
    assert node.got(Done)[0].digest == ""


def test_one_connection_serves_many_transfers(layout: KVLayout, node: FakeNode, make_sender: Make) -> None:
    sender = make_sender()
    for i in range(5):
        session = sender.join(node.params(f"t{i}"), 8)
        session.send(chunks(layout, 8, 8)[0])
        session.finish()
    assert node.connections == 1
    assert sender.stats().sessions == 0


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (RefusedCode.CONTEXT, InvalidRequest),
        (RefusedCode.LAYOUT, LayoutMismatch),
        (RefusedCode.UNKNOWN, TransferFailed),
        (RefusedCode.STALE, TransferFailed),
        (RefusedCode.DRAINING, AdmissionRejected),
    ],
)
def test_refusals_are_typed(node: FakeNode, make_sender: Make, code: str, error: type[RequestError]) -> None:
    node.refuse(code)
    with pytest.raises(error) as caught:
        make_sender().join(node.params(), 8)
    if code == RefusedCode.CONTEXT:
        assert caught.value.code == "context_length_exceeded"
    if isinstance(caught.value, AdmissionRejected):
        assert not caught.value.contended


def test_a_small_landing_says_what_is_needed(node: FakeNode, make_sender: Make) -> None:
    node.refuse(RefusedCode.TOO_SMALL, need=77)
    with pytest.raises(LandingTooSmall) as caught:
        make_sender().join(node.params(), 77)
    assert caught.value.need == 77


def test_a_foreign_layout_is_refused_without_a_connection(node: FakeNode, make_sender: Make) -> None:
    other = node.params()
    other = type(other)(other.transfer_id, 1, other.host, other.port, "feedface")
    with pytest.raises(LayoutMismatch):
        make_sender().join(other, 8)
    assert node.connections == 0


def test_a_refused_hello_fails_every_join(node: FakeNode, make_sender: Make) -> None:
    node.answer = lambda message: Refused("", RefusedCode.PROTOCOL, "protocol 1 and 2")
    with pytest.raises(TransferFailed, match="protocol 1 and 2"):
        make_sender().join(node.params(), 8)


def test_another_transport_is_refused(node: FakeNode, make_sender: Make) -> None:
    node.answer = lambda message: Welcome("n", "0", "shm", b"")
    with pytest.raises(TransferFailed, match="transport"):
        make_sender().join(node.params(), 8)


def test_nobody_listens(node: FakeNode, make_sender: Make) -> None:
    sender = make_sender()
    params = node.params()
    node.close()
    for _ in range(3):
        with pytest.raises(TransferFailed):
            sender.join(params, 8)
    assert sender.stats().channels == 0


def test_a_join_that_nobody_waits_for_is_left_when_it_is_accepted(node: FakeNode, make_sender: Make) -> None:
    node.answer = lambda message: node.default(message) if isinstance(message, Hello) else None
    sender = make_sender()
    with pytest.raises(TransferFailed, match="did not answer"):
        sender.join(node.params(), 8, timeout_s=0.05)
    until(lambda: node.got(Join), "join")
    node.say(node.default(node.got(Join)[0]))
    until(lambda: node.got(Leave), "leave")
    assert node.got(Leave)[0].stopped
    assert sender.stats().sessions == 0


def test_revoke_in_the_middle(layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport) -> None:
    transport.held.add(node.transport)
    told: list[RequestError] = []
    sender = make_sender()
    session = sender.begin_join(node.params(), 24, on_end=told.append).result(5)
    first, second, _ = chunks(layout, 24, 8)
    session.send(first)
    node.say(Revoke("t1", 1, "cancelled"))
    until(lambda: node.got(Leave), "leave")
    assert session.revoked
    assert node.got(Leave)[0].stopped
    assert [type(e) for e in told] == [TransferFailed]
    with pytest.raises(TransferFailed, match="cancelled"):
        session.send(second)
    assert not transport.posted()
    assert not any(node.landings["t1"].view or b"x")
    assert not node.got(Done)


def test_a_revoke_of_another_generation_is_not_ours(layout: KVLayout, node: FakeNode, make_sender: Make) -> None:
    session = make_sender().join(node.params(), 8)
    node.say(Revoke("t1", 0, "old"))
    node.say(Revoke("t9", 1, "foreign"))
    session.send(chunks(layout, 8, 8)[0])
    session.finish()
    assert not session.revoked


def test_what_cannot_be_aborted_is_left_unproven_and_its_slot_is_kept_until_the_peer_closed(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    transport.held.add(node.transport)
    transport.can_abort = False
    sender = make_sender()
    session = sender.join(node.params(), 16)
    session.send(chunks(layout, 16, 8)[0])
    session.fail("client left")
    until(lambda: node.got(Leave), "leave")
    assert not node.got(Leave)[0].stopped
    assert transport.peers[0].closed
    assert sender.stats().slots_free == sender.stats().slots
    session.fail("again")
    assert len(node.got(Leave)) == 1


def test_the_slot_of_an_aborted_write_is_kept_until_the_peer_closed(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    """A transport whose abort is not true would otherwise send another request's bytes from it."""
    transport.held.add(node.transport)
    sender = make_sender()
    session = sender.join(node.params(), 16)
    session.send(chunks(layout, 16, 8)[0])
    free_at_close: list[int] = []
    peer = transport.peers[0]
    close = peer.close
    peer.close = lambda: (free_at_close.append(sender.stats().slots_free), close())  # type: ignore[method-assign]
    session.fail("client left")
    assert free_at_close == [sender.stats().slots - 1]
    assert sender.stats().slots_free == sender.stats().slots


def test_a_failed_write_fails_the_session_and_leaves(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    transport.held.add(node.transport)
    told: list[RequestError] = []
    session = make_sender().begin_join(node.params(), 8, on_end=told.append).result(5)
    session.send(chunks(layout, 8, 8)[0])
    future = session.begin_finish()
    transport.let_go(TransferState.FAILED)
    with pytest.raises(TransferFailed):
        future.result(5)
    until(lambda: node.got(Leave), "leave")
    assert len(told) == 1
    assert not node.got(Done)


def test_a_refused_write_fails_the_session(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    transport.refuse_writes = True
    session = make_sender().join(node.params(), 8)
    with pytest.raises(TransferFailed):
        session.send(chunks(layout, 8, 8)[0])
    until(lambda: node.got(Leave), "leave")
    assert node.got(Leave)[0].stopped


def test_a_vanished_node_fails_its_sessions_at_once_and_is_dialled_again(
    layout: KVLayout, node: FakeNode, make_sender: Make
) -> None:
    told = threading.Event()
    sender = make_sender()
    session = sender.begin_join(node.params(), 16, on_end=lambda e: told.set()).result(5)
    session.send(chunks(layout, 16, 8)[0])
    node.vanish()
    assert told.wait(5)
    with pytest.raises(TransferFailed):
        session.send(chunks(layout, 16, 8)[1])
    until(lambda: sender.stats().channels == 0, "channel forgotten")
    again = sender.join(node.params("t2"), 8)
    again.send(chunks(layout, 8, 8)[0])
    again.finish()
    assert node.connections == 2


def test_back_pressure_waits_for_a_slot(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    transport.held.add(node.transport)
    sender = make_sender(slots=2)
    session = sender.join(node.params(), 24)
    first, second, third = chunks(layout, 24, 8)
    session.send(first)
    blocked = threading.Thread(target=lambda: (session.send(second), session.send(third)))
    blocked.start()
    until(lambda: len(transport.posted()) == 1, "one write")
    assert next(transport.writes) == 1  # only the first chunk was posted
    transport.held.clear()
    transport.let_go()
    blocked.join(5)
    assert not blocked.is_alive()
    session.finish()


def test_no_slot_within_the_budget(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    transport.held.add(node.transport)
    session = make_sender(slots=2).join(node.params(budget_s=0.05), 24)
    first, second, _ = chunks(layout, 24, 8)
    session.send(first)
    with pytest.raises(LeaseExpired):
        session.send(second)
    until(lambda: node.got(Leave), "leave")


def test_a_node_that_takes_nothing_counts_as_stopped(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    transport.held.add(node.transport)
    session = make_sender(slots=2).join(node.params(), 24)
    first, second, _ = chunks(layout, 24, 8)
    session.send(first, 0.05)
    with pytest.raises(LeaseExpired):
        session.send(second, 0.05)


def test_failing_wakes_a_blocked_send(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    transport.held.add(node.transport)
    session = make_sender(slots=2).join(node.params(), 24)
    first, second, _ = chunks(layout, 24, 8)
    session.send(first)
    caught: list[BaseException] = []

    def send() -> None:
        try:
            session.send(second)
        except RequestError as error:
            caught.append(error)

    blocked = threading.Thread(target=send)
    blocked.start()
    session.fail("client left")
    blocked.join(5)
    assert not blocked.is_alive()
    assert caught


def test_a_slow_target_delays_no_other(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    transport.held.add(node.transport)
    other = FakeNode(layout)
    try:
        sender = make_sender(slots=3)
        slow = [sender.join(node.params(f"slow{i}"), 64) for i in range(2)]
        ended: list[RequestError] = []

        def work(session: Session) -> None:
            try:
                for chunk in chunks(layout, 64, 8):
                    session.send(chunk)
            except RequestError as error:
                ended.append(error)

        threads = [threading.Thread(target=work, args=(session,)) for session in slow]
        for thread in threads:
            thread.start()
        until(lambda: len(transport.posted()) >= 2, "slow writes")
        fast = sender.join(other.params("fast"), 64)
        for chunk in chunks(layout, 64, 8):
            fast.send(chunk)
        fast.finish(5)
        assert len(other.got(Done)) <= 1  # the message may still be on its way; the bytes are there
        for session in slow:
            session.fail("enough")
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
        assert len(ended) == 2
    finally:
        other.close()


def test_finish_waits_for_the_writes(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    transport.held.add(node.transport)
    session = make_sender().join(node.params(), 8)
    session.send(chunks(layout, 8, 8)[0])
    future = session.begin_finish()
    assert not future.done()
    assert not node.got(Done)
    transport.let_go()
    assert future.result(5) == session.nbytes
    until(lambda: node.got(Done), "done")


def test_finish_that_takes_too_long_fails_the_session(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    transport.held.add(node.transport)
    session = make_sender().join(node.params(), 8)
    session.send(chunks(layout, 8, 8)[0])
    with pytest.raises(LeaseExpired):
        session.finish(0.01)
    until(lambda: node.got(Leave), "leave")


def test_a_short_prompt_is_never_called_done(layout: KVLayout, node: FakeNode, make_sender: Make) -> None:
    session = make_sender().join(node.params(), 16)
    session.send(chunks(layout, 16, 8)[0])
    with pytest.raises(EngineFailed, match="8 of 16"):
        session.finish()
    until(lambda: node.got(Leave), "leave")
    assert not node.got(Done)


def test_chunks_out_of_order_or_of_the_wrong_size_are_refused(
    layout: KVLayout, node: FakeNode, make_sender: Make
) -> None:
    session = make_sender().join(node.params(), 16)
    first, second = chunks(layout, 16, 8)
    with pytest.raises(EngineFailed):
        session.send(second)
    with pytest.raises(EngineFailed):
        session.send(type(first)(0, 8, first.nbytes - 1, first.write_into))
    big = chunks(layout, 16, 16)[0]
    with pytest.raises(EngineFailed):
        session.send(big)
    session.fail("broken engine")


def test_a_chunk_that_cannot_be_copied_gives_its_slot_back(layout: KVLayout, node: FakeNode, make_sender: Make) -> None:
    sender = make_sender()
    session = sender.join(node.params(), 8)

    def broken(region: object) -> None:
        raise RuntimeError("device lost")

    chunk = chunks(layout, 8, 8)[0]
    with pytest.raises(RuntimeError):
        session.send(type(chunk)(0, 8, chunk.nbytes, broken))
    assert sender.stats().slots_free == sender.stats().slots
    session.fail("device lost")


def test_a_second_writer_of_one_transfer_is_refused(node: FakeNode, make_sender: Make) -> None:
    sender = make_sender()
    session = sender.join(node.params(), 8)
    with pytest.raises(TransferFailed, match="already"):
        sender.join(node.params(), 8)
    session.fail("enough")


def test_closing_the_sender_leaves_every_landing(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    transport.held.add(node.transport)
    sender = make_sender()
    session = sender.join(node.params(), 16)
    session.send(chunks(layout, 16, 8)[0])
    sender.close()
    until(lambda: node.got(Leave), "leave")
    with pytest.raises(RequestError):
        session.send(chunks(layout, 16, 8)[1])
    with pytest.raises(TransferFailed, match="closed"):
        sender.join(node.params("t2"), 8)


def test_staging_that_is_too_small_is_a_configuration_error(make_sender: Make) -> None:
    with pytest.raises(ConfigError, match=r"handoff\.staging_bytes"):
        make_sender(staging_bytes=100)


def test_garbage_from_the_node_ends_the_channel(node: FakeNode, make_sender: Make) -> None:
    node.answer = lambda message: Accept("x", 1, 1, "", 0, b"")
    with pytest.raises(TransferFailed, match="control protocol"):
        make_sender().join(node.params(), 8)


def test_a_write_that_is_done_twice_frees_nothing_that_is_still_read(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    transport.held.add(node.transport)
    sender = make_sender(max_ops=1)
    session = sender.join(node.params(), 8)
    session.send(chunks(layout, 8, 8)[0])
    first, second = transport.posted()
    first.end(TransferState.DONE)
    assert first.on_done is not None
    first.on_done(first)
    assert sender.stats().slots_free == sender.stats().slots - 1
    second.end(TransferState.DONE)
    assert sender.stats().slots_free == sender.stats().slots
    session.finish()


def test_a_revoke_before_the_accept_fails_the_join(node: FakeNode, make_sender: Make) -> None:
    node.answer = lambda message: node.default(message) if isinstance(message, Hello) else None
    sender = make_sender()
    joined = sender.begin_join(node.params(), 8)
    until(lambda: node.got(Join), "join")
    node.say(Revoke("t1", 1, "cancelled"))
    with pytest.raises(TransferFailed, match="cancelled"):
        joined.result(5)
    node.say(node.default(node.got(Join)[0]))
    until(lambda: node.got(Leave), "leave")
