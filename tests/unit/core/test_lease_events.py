"""Single events of the lease table, where the exact answer matters to a peer."""

import pytest

from pdhub.api import AdmissionRejected, InvalidRequest, LeaseExpired, RequestCancelled, TransferFailed
from pdhub.core import lease as lease_module
from pdhub.core.lease import LeaseTable
from pdhub.core.lease_effects import Ended, Fence, Grant, Ready, Refusal, Refuse, Release, Restart, Revoke, StopDecode
from pdhub.core.lease_state import LeaseTimes, Terms
from pdhub.wire.control import RefusedCode

TIMES = LeaseTimes(deadline_s=10, ready_ttl_s=5, revoke_s=1, fence_within_s=2)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return LeaseTable(2, TIMES, clock, first_generation=7)


def joined(table, transfer="a", writers=1):
    lease = table.claim(transfer, f"mem-{transfer}", Terms(16, 30, writers), ttl_s=3)
    for rank in range(writers):
        effects = table.join("w", transfer, lease.generation, rank, writers, 16)
        assert effects == [Grant("w", transfer, lease.generation, rank, f"mem-{transfer}")]
    return lease


def test_refusals_are_spelt_as_on_the_wire():
    wire = {v for k, v in vars(RefusedCode).items() if k.isupper()} | {TransferFailed.code}
    assert {r.value for r in Refusal} <= wire


def test_the_good_way(table, clock):
    lease = joined(table, writers=2)
    g = lease.generation
    assert g == 7
    assert table.done("w", "a", g, 0, 100, "d0") == []
    assert table.done("w", "a", g, 1, 50, "d1") == [Ready("a")]
    assert table.done("w", "a", g, 1, 50, "d1") == []
    assert table.leave("w", "a", g, 1, "late") == []
    assert table.writer_vanished("w") == []
    assert (lease.nbytes, lease.tokens, [w.digest for w in lease.writers.values()]) == (150, 16, ["d0", "d1"])
    table.expect("a", g)
    clock.now += 1000
    assert table.expire() == []  # whoever waits for a slot decides how long
    table.start_decode("a", g)
    assert table.finish("a") == [Release("a", g, "mem-a")]
    assert table.finish("a") == table.cancel("a") == []
    assert len(table) == 0
    assert table.claim("b", "mem-b", Terms(1, 1), 1).generation == 8


@pytest.mark.parametrize(
    ("change", "code", "need"),
    [
        ({"transfer_id": "zz"}, Refusal.UNKNOWN, 0),
        ({"generation": 6}, Refusal.STALE, 0),
        ({"generation": 8}, Refusal.STALE, 0),
        ({"writers": 2}, Refusal.LAYOUT, 0),
        ({"rank": 1}, Refusal.LAYOUT, 0),
        ({"rank": -1}, Refusal.LAYOUT, 0),
        ({"tokens": 0}, Refusal.FAILED, 0),
        ({"tokens": 17}, Refusal.TOO_SMALL, 17),
        ({"tokens": 31}, Refusal.CONTEXT, 31),
    ],
)
def test_joins_that_are_refused(table, change, code, need):
    table.claim("a", "mem", Terms(16, 30), 3)
    ask = {"transfer_id": "a", "generation": 7, "rank": 0, "writers": 1, "tokens": 16} | change
    (answer,) = table.join("w", **ask)
    assert isinstance(answer, Refuse)
    assert (answer.code, answer.need, answer.owner) == (code, need, "w")
    assert table.counts()["claimed"] == 1


def test_a_shard_has_one_writer(table):
    lease = joined(table)
    assert isinstance(table.join("w", "a", lease.generation, 0, 1, 16)[0], Grant)
    assert table.join("other", "a", lease.generation, 0, 1, 16)[0].code is Refusal.FAILED


def test_writers_must_agree_on_the_prompt(table):
    lease = table.claim("a", "mem", Terms(16, 30, 2), 3)
    table.join("w", "a", lease.generation, 0, 2, 16)
    assert table.join("w", "a", lease.generation, 1, 2, 15)[0].code is Refusal.FAILED


def test_cancel_waits_for_the_writer_then_fences(table, clock):
    lease = joined(table)
    ended, revoke = table.cancel("a", "client left")
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, RequestCancelled)
    assert revoke == Revoke("w", "a", 7, 0, "client left")
    assert table.join("w", "a", 7, 0, 1, 16)[0].code is Refusal.UNKNOWN
    clock.now += 0.9
    assert table.expire() == []
    clock.now += 0.2
    assert table.expire() == [Fence("a", 7, "mem-a")]
    assert table.leave("w", "a", 7, 0, "stopped") == []  # the fence still works on the memory
    assert table.fenced("a", 7, False) == [Release("a", 7, "mem-a")]  # and the writer stopped by itself
    assert lease.state == "released"


def test_a_writer_that_cannot_promise_is_fenced_at_once(table):
    joined(table)
    effects = table.leave("w", "a", 7, 0, "write error", stopped=False)
    assert [type(e) for e in effects] == [Ended, Revoke, Fence]
    assert table.fenced("a", 7, True) == [Release("a", 7, "mem-a")]


def test_an_unproven_fence_restarts_the_node_and_keeps_the_memory(table, clock):
    joined(table, "a")
    joined(table, "b")
    assert [type(e) for e in table.writer_vanished("w")] == [Ended, Revoke, Fence] * 2
    assert [type(e) for e in table.fenced("a", 7, False)] == [Restart]
    clock.now += 100
    assert table.expire() == []  # one restart is enough
    assert table.counts()["quarantined"] == 2
    assert table.fenced("b", 8, True) == [Release("b", 8, "mem-b")]


def test_a_fence_that_never_answers_restarts_the_node(table, clock):
    joined(table)
    table.writer_vanished("w")
    clock.now += 2.9
    assert table.expire() == []
    clock.now += 0.2
    assert [type(e) for e in table.expire()] == [Restart]


def test_cancel_while_decoding_keeps_the_landing_until_the_stream_ended(table):
    joined(table)
    table.done("w", "a", 7, 0, 1)
    table.start_decode("a", 7)
    assert table.cancel("a") == [StopDecode("a")]
    assert table.cancel("a") == []
    assert table.counts()["decoding"] == 1
    assert table.finish("a") == [Release("a", 7, "mem-a")]


@pytest.mark.parametrize("state", ["claimed", "writing", "ready"])
def test_every_waiting_state_has_an_end(table, clock, state):
    if state == "claimed":
        table.claim("a", "mem-a", Terms(16, 30), 3)
    else:
        joined(table)
    if state == "ready":
        table.done("w", "a", 7, 0, 1)
    clock.now = table.next_deadline()
    effects = table.expire()
    assert isinstance(effects[0].error, LeaseExpired)
    assert isinstance(effects[-1], Revoke if state == "writing" else Release)


def test_a_cancel_that_overtakes_its_claim_wins(table):
    assert table.cancel("a") == []
    with pytest.raises(InvalidRequest) as caught:
        table.claim("a", "mem", Terms(1, 1), 1)
    assert caught.value.code == "duplicate_transfer"
    assert table.landings.free == 2


def test_ids_are_unique_also_after_their_end(table):
    joined(table)
    with pytest.raises(InvalidRequest):
        table.admit("a")
    table.done("w", "a", 7, 0, 1)
    table.cancel("a")
    with pytest.raises(InvalidRequest):
        table.admit("a")


def test_memory_of_ended_ids_is_bounded(table, monkeypatch):
    monkeypatch.setattr(lease_module, "REMEMBERED", 3)
    for i in range(10):
        table.cancel(f"t{i}")
    table.admit("t0")
    with pytest.raises(InvalidRequest):
        table.admit("t9")


def test_a_full_node_says_so(table):
    joined(table, "a")
    joined(table, "b")
    with pytest.raises(AdmissionRejected) as caught:
        table.admit("c")
    assert caught.value.contended


def test_decode_learns_why_a_lease_ended(table):
    joined(table)
    with pytest.raises(LeaseExpired):
        table.expect("a", 6)
    table.leave("w", "a", 7, 0, "disk on fire")
    for _ in range(2):
        with pytest.raises(TransferFailed, match="disk on fire"):
            table.expect("a", 7)
        with pytest.raises(TransferFailed, match="disk on fire"):
            table.start_decode("a", 7)
    with pytest.raises(LeaseExpired, match="no such transfer"):
        table.expect("never", 1)


def test_only_one_may_decode(table):
    joined(table)
    table.expect("a", 7)
    with pytest.raises(InvalidRequest):
        table.expect("a", 7)
    with pytest.raises(LeaseExpired, match="not ready"):
        table.start_decode("a", 7)
