"""The worker's side of the connector, with a real sender and a node that is a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdhub.api import GroupKind, KVGroup, KVLayout, Region
from pdhub.connector.handover import Handover
from pdhub.connector.pump import Pump
from pdhub.connector.steps import Advance, End, Start
from pdhub.core.handoff import chunk_bytes
from pdhub.sender import Sender
from pdhub.wire.control import Done, Join, Leave, RefusedCode, Revoke
from tests.unit.sender.fakenode import FakeNode, HeldTransport, until

BLOCK = 4
LAYOUT = KVLayout("m", 1, 1, (KVGroup("kv", GroupKind.MLA, (0,), BLOCK, BLOCK, (f"token:{BLOCK}", "byte:1"), "uint8"),))


class FakeCache:
    """A cache of one byte a token: block ``b`` holds ``16 * b``, ``16 * b + 1`` …"""

    align = BLOCK

    def __init__(self) -> None:
        self.copies: list[tuple[str, int, int]] = []
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.broken = False

    def mark(self) -> None:
        return None

    def nbytes(self, start: int, stop: int, tokens: int) -> int:
        return chunk_bytes(LAYOUT, start, stop, tokens)

    def copy(self, handover: Handover, start: int, stop: int, region: Region) -> None:
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.broken:
            raise RuntimeError("no such block")
        view = region.view
        assert view is not None
        for token in range(start, stop):
            view[token - start] = 16 * handover.table[0][token // BLOCK] + token % BLOCK
        self.copies.append((handover.start.req_id, start, stop))


@pytest.fixture
def node() -> Iterator[FakeNode]:
    made = FakeNode(LAYOUT)
    yield made
    made.close()


@pytest.fixture
def transport() -> Iterator[HeldTransport]:
    made = HeldTransport()
    made.open()
    yield made
    made.close()


@pytest.fixture
def cache() -> FakeCache:
    return FakeCache()


@pytest.fixture
def make(transport: HeldTransport, cache: FakeCache) -> Iterator[Callable[..., Pump]]:
    pumps: list[Pump] = []
    senders: list[Sender] = []

    def pump(slots: int = 4, **more: Any) -> Pump:
        def sender(on_slot: Callable[[], None]) -> Sender:
            options = {"chunk_tokens": 8, "staging_bytes": 1 << 16, "slots": slots, "on_slot": on_slot}
            senders.append(Sender(transport, name="s", layout=LAYOUT, **options))  # type: ignore[arg-type]
            return senders[-1]

        pumps.append(Pump(sender, cache, most=8, **more))
        return pumps[-1]

    yield pump
    transport.let_go()
    for one in pumps:
        one.close()
        one.close()
    for one in senders:
        until(lambda s=one: s.stats().slots_free == s.stats().slots, "all slots free")
    assert not [t.name for t in threading.enumerate() if t.name.startswith("pdhub")]


def whole(req_id: str, blocks: list[int], computed: int, before: int = 0, fresh: bool = True) -> Advance:
    return Advance(req_id, (tuple(blocks),), fresh, before, computed)


def landed(node: FakeNode, transfer_id: str, tokens: int) -> list[int]:
    view = node.landings[transfer_id].view
    assert view is not None
    return list(view[:tokens])


def test_every_step_is_sent_when_it_is_computed_and_blocks_come_back_after_the_last(
    node: FakeNode, make: Callable[..., Pump], cache: FakeCache
) -> None:
    pump = make()
    pump.start(Start("r", node.params(), 22))
    until(lambda: node.got(Join), "join")
    assert node.got(Join) == [Join("t1", 1, 0, 1, 22)]
    pump.advance(whole("r", [3, 1], 6), None)
    until(lambda: cache.copies == [("r", 0, 4)], "the first whole block")
    pump.advance(whole("r", [2, 5, 4, 7], 20, 6, fresh=False), None)
    until(lambda: cache.copies[-1] == ("r", 12, 20), "whole blocks in pieces of 8")
    assert pump.released() == set()
    pump.advance(whole("r", [], 22, 20, fresh=False), None)
    pump.end(End("r", True, True))
    until(lambda: node.got(Done), "done")
    until(lambda: pump.active == 0, "the end")
    assert pump.released() == {"r"}
    assert pump.released() == set()
    assert pump.report() is None
    assert (pump.handed_over, pump.failed) == (1, 0)
    want = [16 * block + i for block in (3, 1, 2, 5, 4, 7) for i in range(BLOCK)]
    assert landed(node, "t1", 22) == want[:22]


def test_blocks_are_held_until_the_join_is_answered_and_the_copy_made(
    node: FakeNode, make: Callable[..., Pump], cache: FakeCache
) -> None:
    late = threading.Event()

    def answer(message: Any) -> Any:
        if isinstance(message, Join):
            assert late.wait(10)
        return node.default(message)

    node.answer = answer
    pump = make()
    pump.start(Start("r", node.params(), 5))
    pump.advance(whole("r", [1, 2], 5), None)
    pump.end(End("r", True, True))
    assert pump.released() == set()
    cache.gate = threading.Event()
    late.set()
    assert cache.entered.wait(10)
    assert pump.released() == set()
    cache.gate.set()
    released: set[str] = set()
    until(lambda: released.update(pump.released()) or released == {"r"}, "the blocks")
    until(lambda: node.got(Done), "done")
    assert landed(node, "t1", 5) == [16, 17, 18, 19, 32]


def test_a_preemption_waits_for_the_copy_and_what_was_copied_is_not_sent_again(
    node: FakeNode, make: Callable[..., Pump], cache: FakeCache
) -> None:
    pump = make()
    pump.start(Start("r", node.params(), 12))
    cache.gate = threading.Event()
    pump.advance(whole("r", [1, 2], 8), None)
    assert cache.entered.wait(10)
    preempted = threading.Thread(target=pump.preempt, args=("r",))
    preempted.start()
    preempted.join(0.05)
    assert preempted.is_alive()  # the block may not be overwritten yet
    cache.gate.set()
    preempted.join(10)
    assert cache.copies == [("r", 0, 8)]
    pump.advance(whole("r", [5], 4), None)
    pump.advance(whole("r", [6, 7], 12, 4, fresh=False), None)
    pump.end(End("r", True, True))
    until(lambda: node.got(Done), "done")
    assert cache.copies == [("r", 0, 8), ("r", 8, 12)]
    assert landed(node, "t1", 12) == [16, 17, 18, 19, 32, 33, 34, 35, 112, 113, 114, 115]


def test_a_node_that_takes_nothing_delays_nobody_and_keeps_only_its_own_blocks(
    node: FakeNode, make: Callable[..., Pump], transport: HeldTransport
) -> None:
    other = FakeNode(LAYOUT)
    try:
        transport.held.add(node.transport)
        pump = make(slots=4)
        pump.start(Start("slow", node.params("a"), 64))
        pump.advance(whole("slow", list(range(16)), 64), None)
        pump.end(End("slow", True, True))
        for i in range(5):
            pump.start(Start(f"r{i}", other.params(f"b{i}"), 16))
            pump.advance(whole(f"r{i}", [1, 2, 3, 4], 16), None)
            pump.end(End(f"r{i}", True, True))
        until(lambda: len(other.got(Done)) == 5, "the others")
        released = pump.released()
        assert "slow" not in released
        transport.held.clear()
        transport.let_go()
        until(lambda: node.got(Done), "the slow one")
        until(lambda: released.update(pump.released()) or "slow" in released, "its blocks")
        assert pump.report() is None
    finally:
        other.close()


def test_a_node_that_is_too_late_fails_its_hand_over_and_gives_the_blocks_back(
    node: FakeNode, make: Callable[..., Pump], transport: HeldTransport
) -> None:
    transport.held.add(node.transport)
    pump = make(slots=2)
    pump.start(Start("r", node.params(budget_s=0.3), 64))
    pump.advance(whole("r", list(range(16)), 64), None)
    pump.end(End("r", True, True))
    released: set[str] = set()
    until(lambda: released.update(pump.released()) or released == {"r"}, "the blocks")
    report = pump.report()
    assert report is not None
    assert report.failures["r"].code == "lease_expired"
    until(lambda: node.got(Leave), "leave")


@pytest.mark.parametrize("code", [RefusedCode.TOO_SMALL, RefusedCode.LAYOUT, RefusedCode.UNKNOWN])
def test_a_refused_join_is_reported_and_holds_nothing(node: FakeNode, make: Callable[..., Pump], code: str) -> None:
    node.refuse(code, need=70)
    pump = make()
    pump.start(Start("r", node.params(), 64))
    pump.advance(whole("r", list(range(16)), 64), None)
    reports: list[Any] = []
    until(lambda: reports.append(pump.report()) or reports[-1], "the report")
    failure = reports[-1].failures["r"]
    assert failure.need == (70 if code == RefusedCode.TOO_SMALL else 0)
    pump.end(End("r", True, True))
    until(lambda: pump.active == 0, "the end")
    assert pump.released() == {"r"}


def test_a_node_that_is_not_there(make: Callable[..., Pump], node: FakeNode) -> None:
    params = node.params()
    node.close()
    pump = make()
    pump.start(Start("r", params, 8))
    pump.end(End("r", True, True))
    released: set[str] = set()
    until(lambda: released.update(pump.released()) or released == {"r"}, "the blocks")


def test_a_revoked_landing_stops_the_hand_over(node: FakeNode, make: Callable[..., Pump]) -> None:
    pump = make()
    pump.start(Start("r", node.params(), 64))
    pump.advance(whole("r", [1, 2], 8), None)
    until(lambda: "t1" in node.landings, "the join")
    node.say(Revoke("t1", 1, "cancelled"))
    until(lambda: node.got(Leave), "leave")
    pump.advance(whole("r", [3], 12, 8, fresh=False), None)
    pump.end(End("r", True, False))
    until(lambda: pump.active == 0, "the end")
    assert pump.released() == {"r"}


def test_an_aborted_prompt_is_left(node: FakeNode, make: Callable[..., Pump]) -> None:
    pump = make()
    pump.start(Start("r", node.params(), 64))
    pump.advance(whole("r", [1, 2], 8), None)
    until(lambda: "t1" in node.landings, "the join")
    pump.end(End("r", True, False))
    until(lambda: node.got(Leave), "leave")
    until(lambda: pump.active == 0, "the end")
    assert pump.released() == {"r"}
    assert pump.failed == 0


def test_a_copy_that_breaks_fails_one_hand_over(node: FakeNode, make: Callable[..., Pump], cache: FakeCache) -> None:
    cache.broken = True
    pump = make()
    pump.start(Start("r", node.params("a"), 8))
    pump.advance(whole("r", [1, 2], 8), None)
    pump.end(End("r", True, True))
    until(lambda: node.got(Leave), "leave")
    cache.broken = False
    pump.start(Start("s", node.params("b"), 8))
    pump.advance(whole("s", [1, 2], 8), None)
    pump.end(End("s", True, True))
    until(lambda: node.got(Done), "done")
    assert pump.failed == 1


def test_unknown_requests_are_none_of_its_business(make: Callable[..., Pump]) -> None:
    pump = make()
    pump.advance(whole("x", [1], 4), None)
    pump.preempt("x")
    pump.forget_before("x", 3)
    pump.end(End("x", False, True))
    pump.end(End("y", True, True))
    assert pump.released() == {"y"}
