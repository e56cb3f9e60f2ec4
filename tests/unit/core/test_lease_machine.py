"""No interleaving of events lets two leases be writable over one span, loses capacity, or frees twice.

The machine plays the whole world around a lease table: an allocator that hands out spans, writers that write until
they said that they stopped (or a fence stopped them), a clock, and a host that performs every effect. The broken
tables at the end show that the rules have teeth.
"""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pdhub.api import AdmissionRejected, InvalidRequest, RequestError, Span
from pdhub.core.lease import LeaseTable
from pdhub.core.lease_effects import Ended, Fence, Grant, Ready, Refuse, Release, Restart, Revoke, StopDecode
from pdhub.core.lease_state import LeaseState, LeaseTimes, Terms, WriterPhase

CAPACITY = 2
SIZE = 16
TIMES = LeaseTimes(deadline_s=10, ready_ttl_s=10, revoke_s=1, fence_within_s=2)


class Allocator:
    """Hands out the lowest free span, so that memory is reused as early as it can be."""

    def __init__(self):
        self.taken = {}  # generation -> span

    def lowest(self):
        used = set(self.taken.values())
        return next(s for i in range(CAPACITY) if (s := Span(i * SIZE, SIZE)) not in used)

    def free(self, generation):
        assert generation in self.taken, f"{generation} was freed twice"
        del self.taken[generation]


claimed = precondition(lambda world: world.generations)
ages = st.sampled_from([0, 0, 1, 2])
owners = st.sampled_from("xxy")
ranks = st.sampled_from([0, 0, 1])


class LeaseWorld(RuleBasedStateMachine):
    table_class = LeaseTable

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.table = self.table_class(CAPACITY, TIMES, lambda: self.now)
        self.memory = Allocator()
        self.generations = {}
        self.shards = {}
        self.writable = {}  # (owner, generation, rank) -> span: the writer may write this very moment
        self.fencing = set()
        self.reading = set()
        self.stop_asked = set()
        self.ready = set()
        self.ended = set()
        self.restarts = 0

    # -- the host --

    def perform(self, effects):
        for effect in effects:
            match effect:
                case Grant():
                    lease = self.table.get(effect.transfer_id)
                    assert lease.state is LeaseState.WRITING, "a right to write was given outside of WRITING"
                    self.writable[effect.owner, effect.generation, effect.rank] = effect.landing
                case Fence():
                    assert effect.generation not in self.fencing, "fenced while a fence is at work"
                    self.fencing.add(effect.generation)
                case Release():
                    assert effect.generation not in self.reading, "freed under a running stream"
                    assert effect.generation not in self.fencing, "freed under a running fence"
                    assert not self.writers_of(effect.generation), "freed under a writer"
                    self.memory.free(effect.generation)
                case Ready():
                    assert effect.transfer_id not in self.ready | self.ended
                    assert len(self.table.get(effect.transfer_id).writers) == self.shards[effect.transfer_id]
                    self.ready.add(effect.transfer_id)
                case Ended():
                    assert effect.transfer_id not in self.ended, "ended twice"
                    self.ended.add(effect.transfer_id)
                case StopDecode():
                    assert effect.transfer_id not in self.stop_asked, "stopped twice"
                    self.stop_asked.add(effect.transfer_id)
                case Restart():
                    self.restarts += 1
                case Refuse() | Revoke():
                    continue

    def writers_of(self, generation):
        return [key for key in self.writable if key[1] == generation]

    def stop_writers(self, generation):
        for key in self.writers_of(generation):
            del self.writable[key]

    def pick(self, age):
        """One of the newest transfers, most of which are live; and its generation."""
        transfer = f"t{max(1, len(self.generations) - age)}"
        return transfer, self.generations[transfer]

    # -- events --

    @rule(shards=st.integers(1, 2))
    def claim(self, shards):
        transfer = f"t{len(self.generations) + 1}"
        try:
            self.table.admit(transfer)
        except AdmissionRejected:
            assert len(self.memory.taken) == CAPACITY, "capacity was lost"
            return
        span = self.memory.lowest()
        lease = self.table.claim(transfer, span, Terms(8, 8, shards), ttl_s=10)
        assert lease.generation > max(self.generations.values(), default=0)
        self.memory.taken[lease.generation] = span
        self.generations[transfer] = lease.generation
        self.shards[transfer] = shards

    @claimed
    @rule(age=ages, owner=owners, rank=ranks, odd=st.sampled_from([None] * 5 + ["stale", "long"]))
    def join(self, age, owner, rank, odd):
        transfer, generation = self.pick(age)
        tokens = 9 if odd == "long" else 8
        effects = self.table.join(owner, transfer, generation - (odd == "stale"), rank, self.shards[transfer], tokens)
        assert len(effects) == 1
        if odd or transfer in self.ended | self.ready or rank >= self.shards[transfer]:
            assert isinstance(effects[0], Refuse)
        self.perform(effects)

    @claimed
    @rule(age=ages, owner=owners, rank=ranks)
    def done(self, age, owner, rank):
        transfer, generation = self.pick(age)
        self.writable.pop((owner, generation, rank), None)  # it stops first, then says so
        self.perform(self.table.done(owner, transfer, generation, rank, nbytes=5))

    @claimed
    @rule(age=ages, shards=st.sampled_from([1, 2, 2]), decode=st.booleans())
    def complete(self, age, shards, decode):
        """Writers join and are done: the straight way to READY, which random moves find too seldom."""
        transfer, generation = self.pick(age)
        for rank in range(shards):
            self.perform(self.table.join("x", transfer, generation, rank, self.shards[transfer], 8))
            self.writable.pop(("x", generation, rank), None)
            self.perform(self.table.done("x", transfer, generation, rank, nbytes=5))
        if decode:
            self.start(transfer, generation)

    @claimed
    @rule(age=ages, owner=owners, rank=ranks, stopped=st.booleans())
    def leave(self, age, owner, rank, stopped):
        transfer, generation = self.pick(age)
        if stopped:
            self.writable.pop((owner, generation, rank), None)
        self.perform(self.table.leave(owner, transfer, generation, rank, "test", stopped))

    @claimed
    @rule(age=ages, rank=ranks)
    def nonsense(self, age, rank):
        transfer, generation = self.pick(age)
        assert self.table.done("stranger", transfer, generation, rank, 1) == []
        assert self.table.leave("stranger", transfer, generation, rank, "", True) == []
        assert self.table.done("x", transfer, generation + 1, rank, 1) == []
        assert self.table.fenced(transfer, generation + 1, True) == []
        with pytest.raises(InvalidRequest):
            self.table.admit(transfer)

    @rule(owner=owners)
    def vanish(self, owner):
        """The connection is gone; the process may well go on writing."""
        self.perform(self.table.writer_vanished(owner))

    @claimed
    @rule(age=ages)
    def cancel(self, age):
        transfer, _ = self.pick(age)
        self.perform(self.table.cancel(transfer))

    @rule(seconds=st.sampled_from([0.5, 3, 11]))
    def expire(self, seconds):
        self.now += seconds
        self.perform(self.table.expire())
        deadline = self.table.next_deadline()
        assert deadline is None or deadline > self.now, "time passed and nothing was done about it"

    @claimed
    @rule(age=ages, ok=st.sampled_from([True, True, False]))
    def fence_answers(self, age, ok):
        transfer, generation = self.pick(age)
        if generation not in self.fencing:
            assert self.table.fenced(transfer, generation, ok) == []
            return
        self.fencing.remove(generation)
        if ok:
            self.stop_writers(generation)
        self.perform(self.table.fenced(transfer, generation, ok))

    @claimed
    @rule(age=ages)
    def expect(self, age):
        transfer, generation = self.pick(age)
        try:
            self.table.expect(transfer, generation)
        except RequestError:
            return
        assert transfer not in self.ended

    @claimed
    @rule(age=ages)
    def start_decode(self, age):
        self.start(*self.pick(age))

    def start(self, transfer, generation):
        try:
            self.table.start_decode(transfer, generation)
        except RequestError:
            return
        assert transfer in self.ready - self.ended
        self.reading.add(generation)

    @claimed
    @rule(age=ages)
    def finish(self, age):
        transfer, generation = self.pick(age)
        self.reading.discard(generation)
        self.perform(self.table.finish(transfer))

    # -- what must always hold --

    @invariant()
    def no_writer_reaches_memory_of_another_lease(self):
        for (owner, generation, _), span in self.writable.items():
            for other, taken in self.memory.taken.items():
                assert other == generation or not span.overlaps(taken), f"{owner} of {generation} writes into {other}"
        spans = list(self.memory.taken.values())
        assert all(not a.overlaps(b) for i, a in enumerate(spans) for b in spans[i + 1 :])

    @invariant()
    def nobody_reads_what_may_still_change(self):
        for generation in self.reading:
            assert not self.writers_of(generation)

    @invariant()
    def counters_agree(self):
        assert len(self.table) == len(self.memory.taken) == self.table.landings.taken
        assert sum(self.table.counts().values()) == len(self.table)
        assert {x.generation for x in self.table} == set(self.memory.taken)
        for lease in self.table:
            if lease.state in (LeaseState.READY, LeaseState.DECODING):
                assert all(w.phase is WriterPhase.DONE for w in lease.writers.values())

    def teardown(self):
        """Whatever happened: once streams ended, fences answered and writers left, all capacity is back."""
        for _ in range(3):
            for transfer, generation in self.generations.items():
                self.reading.discard(generation)
                self.perform(self.table.cancel(transfer))
                self.perform(self.table.finish(transfer))
                if generation in self.fencing:
                    self.fencing.remove(generation)
                    self.stop_writers(generation)
                    self.perform(self.table.fenced(transfer, generation, True))
            for owner, generation, rank in list(self.writable):
                transfer = next(t for t, g in self.generations.items() if g == generation)
                del self.writable[owner, generation, rank]
                self.perform(self.table.leave(owner, transfer, generation, rank, "the end"))
            self.now += 100
            self.perform(self.table.expire())
            self.no_writer_reaches_memory_of_another_lease()
        assert list(self.table) == [], "capacity was lost"
        assert self.restarts <= 1


FAST = settings(deadline=None, max_examples=150, stateful_step_count=40)
TestLeases = LeaseWorld.TestCase
TestLeases.settings = FAST


# -- broken tables, each caught --


class FreesOnCancel(LeaseTable):
    """Releases at once instead of quarantining."""

    def _settle(self, lease):
        return [] if lease.fencing else self._release(lease)


class FreesByTime(LeaseTable):
    """Believes that a quarantine is over after a while."""

    def _fence(self, lease):
        return self._release(lease)


class BelievesAnyFence(LeaseTable):
    """Takes a fence that failed for one that worked."""

    def fenced(self, transfer_id, generation, ok):
        return super().fenced(transfer_id, generation, True)


class BelievesAnyLeave(LeaseTable):
    """Does not care whether the writer can prove that it stopped."""

    def leave(self, owner, transfer_id, generation, rank, reason, stopped=True):
        return super().leave(owner, transfer_id, generation, rank, reason, True)


class ForgetsTheVanished(LeaseTable):
    """Takes a lost connection for a writer that stopped."""

    def writer_vanished(self, owner):
        out = []
        for lease in self:
            for rank, writer in lease.open_writers:
                if writer.owner == owner:
                    out += self.leave(owner, lease.transfer_id, lease.generation, rank, "gone", True)
        return out


class FreesUnderTheStream(LeaseTable):
    """Cancelling a running decode frees its landing before the stream ended."""

    def _fail(self, lease, error, *, fence):
        out = super()._fail(lease, error, fence=fence)
        return out + self.finish(lease.transfer_id)


class FreesTwice(LeaseTable):
    """Tells the host twice."""

    def _release(self, lease):
        return super()._release(lease) * 2


class LosesCapacity(LeaseTable):
    """Forgets to free a landing that nobody joined."""

    def _settle(self, lease):
        return super()._settle(lease) if lease.writers else []


class ReadyTooEarly(LeaseTable):
    """Does not wait for the second shard."""

    def done(self, owner, transfer_id, generation, rank, nbytes, digest=""):
        lease = self.get(transfer_id)
        if lease is not None:
            lease.terms = Terms(8, 8, 1)
        return super().done(owner, transfer_id, generation, rank, nbytes, digest)


class AcceptsStale(LeaseTable):
    """Does not look at the generation of a join."""

    def join(self, owner, transfer_id, generation, rank, writers, tokens):
        lease = self.get(transfer_id)
        return super().join(
            owner, transfer_id, lease.generation if lease is not None else generation, rank, writers, tokens
        )


class JoinsAfterCancel(LeaseTable):
    """Reveals the address although the lease ended."""

    def join(self, owner, transfer_id, generation, rank, writers, tokens):
        lease = self.get(transfer_id)
        if lease is not None and lease.state is LeaseState.QUARANTINED:
            return [Grant(owner, transfer_id, generation, rank, lease.landing)]
        return super().join(owner, transfer_id, generation, rank, writers, tokens)


@pytest.mark.parametrize(
    "broken",
    [
        FreesOnCancel,
        FreesByTime,
        BelievesAnyFence,
        BelievesAnyLeave,
        ForgetsTheVanished,
        FreesUnderTheStream,
        FreesTwice,
        LosesCapacity,
        ReadyTooEarly,
        AcceptsStale,
        JoinsAfterCancel,
    ],
)
def test_a_broken_table_is_caught(broken):
    machine = type(f"World{broken.__name__}", (LeaseWorld,), {"table_class": broken})
    quick = settings(
        deadline=None, max_examples=300, stateful_step_count=30, database=None, derandomize=True,
        report_multiple_bugs=False, phases=[Phase.generate], print_blob=False,
    )  # fmt: skip
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        run_state_machine_as_test(machine, settings=quick)
