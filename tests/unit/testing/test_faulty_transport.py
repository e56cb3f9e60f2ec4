"""Each injected fault does what it says, can be repeated from its seed, and the legal ones break no rule."""

import random

import pytest

from pdhub.api import TransferFailed, TransferState, TransportSpec, WriteOp
from pdhub.testing import TransportConformance
from pdhub.testing.faults import Faults, FaultyTransport
from pdhub.testing.transport_kit import TransportPair
from pdhub.testing.transport_kit.pair import done, first_byte, long_write, pattern, peek, poke, until
from pdhub.transports.plugin import ShmConfig
from pdhub.transports.shm import ShmTransport

SIZE = 1 << 20


def make_spec(seed: int = 1, **faults) -> TransportSpec:
    def factory(config):
        return FaultyTransport(ShmTransport(config), Faults(**faults), random.Random(seed))

    return TransportSpec(name="shm", summary="faulty", config=ShmConfig, factory=factory)


@pytest.fixture
def make():
    pairs = []

    def make(**faults):
        pairs.append(TransportPair(make_spec(**faults), ShmConfig()))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


class TestLegalFaultsAreLegal(TransportConformance):
    """A slow, reordering transport is still a transport."""

    @pytest.fixture
    def spec(self):
        return make_spec(delay_s=0.005, reorder=1)

    # Their other process runs the plain transport: nothing of the wrapper is in them.
    test_T28_a_stopped_writer_that_resumes_changes_nothing = None
    test_T29_a_stopped_writer_survives_unregister = None
    test_T30_a_killed_writer_is_fenced = None
    test_T32_a_killed_target_leaves_nothing = None


def post(pair, target, fill, calls=None):
    source = pair.source(bytes([fill]) * SIZE)
    return pair.post(target, [WriteOp(source, 0, 0, SIZE)], on_done=None if calls is None else calls.append)


def test_flip_changes_one_bit(make):
    pair = make(flip=1)
    target = pair.target(SIZE)
    pair.write(target, pattern(SIZE))
    wrong = [a ^ b for a, b in zip(peek(target.region), pattern(SIZE), strict=True) if a != b]
    assert len(wrong) == 1
    assert wrong[0].bit_count() == 1


def test_lose_leaves_one_operation_out(make):
    pair = make(lose=1)
    target, source = pair.target(10), pair.source(b"x" * 10)
    done(pair.post(target, [WriteOp(source, n, n, 1) for n in range(10)]))
    assert peek(target.region).count(b"x") == 9


def test_fail(make):
    pair = make(fail=1)
    transfer = post(pair, pair.target(SIZE), 1)
    assert transfer.state is TransferState.FAILED
    assert isinstance(transfer.error, TransferFailed)


def test_drop_ends_with_an_abort_or_the_peer(make):
    pair = make(drop=1)
    target = pair.target(SIZE)
    one, two = post(pair, target, 1), post(pair, target, 1)
    assert one.wait(0.02) is TransferState.POSTED
    assert one.abort()
    assert one.state is TransferState.ABORTED
    pair.peer.close()
    assert two.state is TransferState.FAILED
    assert peek(target.region) == bytes(SIZE)


def test_vanish_counts_writes_and_proves_nothing(make):
    pair = make(vanish_after=2)
    target = pair.target(SIZE)
    done(post(pair, target, 1))
    done(post(pair, target, 2))
    silent = post(pair, target, 3)
    assert silent.wait(0.02) is TransferState.POSTED
    assert not silent.abort()
    pair.peer.close()
    assert silent.state is TransferState.FAILED


def test_duplicate_done(make):
    pair = make(duplicate_done=1)
    calls = []
    done(post(pair, pair.target(SIZE), 1, calls))
    until(lambda: len(calls) == 2, "the second call")


@pytest.mark.parametrize("fault", ["lying_abort", "late_write"])
def test_bytes_land_after_a_false_abort(make, fault):
    pair = make(**{fault: 1})
    target = pair.target(SIZE)
    transfer = pair.post(target, long_write(pair, SIZE, 1))
    first_byte(target, 1)
    assert transfer.abort()
    assert transfer.state is TransferState.ABORTED
    poke(target.region, bytes(SIZE))
    first_byte(target, 1)


def test_a_false_fence_revokes_nothing(make):
    pair = make(late_write=1)
    target = pair.target(SIZE)
    assert pair.node.fence(target.region.id, 1)
    done(post(pair, target, 7))
    assert peek(target.region, 0, 1) == b"\x07"


def test_the_same_seed_gives_the_same_faults(make):
    def outcomes(pair):
        target = pair.target(SIZE)
        return [post(pair, target, 1).wait(5) for _ in range(30)]

    runs = [outcomes(make(fail=0.5, seed=seed)) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    assert set(runs[0]) == {TransferState.DONE, TransferState.FAILED}


def test_no_faults_is_the_plain_transport(make):
    pair = make()
    target = pair.target(SIZE)
    pair.write(target, pattern(SIZE))
    assert peek(target.region) == pattern(SIZE)
