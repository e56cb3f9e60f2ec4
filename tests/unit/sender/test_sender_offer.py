"""Sending without a wait, for callers that must never block."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdhub.api import KVLayout, Region, TransferFailed
from pdhub.sender import Sender
from pdhub.sender.staging import host_memory
from pdhub.wire.control import Done, Revoke
from tests.unit.sender.fakenode import FakeNode, HeldTransport, chunks, until

Make = Callable[..., Sender]


def test_an_offer_without_a_slot_changes_nothing_and_is_told_when_to_come_again(
    layout: KVLayout, node: FakeNode, make_sender: Make, transport: HeldTransport
) -> None:
    freed: list[int] = []
    transport.held.add(node.transport)
    sender = make_sender(slots=2, on_slot=lambda: freed.append(1))
    session = sender.join(node.params(), 24)
    first, second, third = chunks(layout, 24, 8)
    assert session.offer(first)
    assert not session.offer(second)
    assert not session.offer(second)
    assert not freed
    transport.held.clear()
    transport.let_go()
    until(lambda: freed, "a free slot")
    assert session.offer(second)
    assert session.offer(third)
    session.finish()
    until(lambda: node.got(Done), "done")


def test_an_offer_to_an_ended_session_says_why(layout: KVLayout, node: FakeNode, make_sender: Make) -> None:
    session = make_sender().join(node.params(), 8)
    node.say(Revoke("t1", 1, "cancelled"))
    until(lambda: session.ended, "the end")
    with pytest.raises(TransferFailed, match="took the landing back"):
        session.offer(chunks(layout, 8, 8)[0])


def test_staging_memory_may_be_the_callers(layout: KVLayout, node: FakeNode, make_sender: Make) -> None:
    made: list[Region] = []

    def memory(region_id: str, nbytes: int) -> Region:
        made.append(host_memory(region_id, nbytes))
        return made[-1]

    session = make_sender(slots=2, memory=memory).join(node.params(), 8)
    session.send(chunks(layout, 8, 8)[0])
    session.finish()
    assert len(made) == 2
