"""A library that does not end what was posted: aborts, closes and failures stay honest."""

import threading

import pytest
from copying import CopyNative, CopyRoute

from pdhub.api import TransferFailed, TransferState, TransportSpec, WriteOp
from pdhub.onesided import OneSidedConfig, OneSidedTransport, Sending, StillUnderWay
from pdhub.onesided import link as module
from pdhub.testing.transport_kit import TransportPair
from pdhub.testing.transport_kit.pair import until


class Hanging(Sending):
    def __init__(self, end):
        self.end = end

    def poll(self):
        if not self.end.is_set():
            return False
        if self.end.error is not None:
            raise self.end.error
        return True


class End(threading.Event):
    error = None


class HangingRoute(CopyRoute):
    def __init__(self, pid, end):
        super().__init__(pid)
        self.end = end

    def post(self, pieces):
        super().post(pieces)
        return Hanging(self.end)


class HangingNative(CopyNative):
    def __init__(self, end, made):
        self.end = end
        self.made = made

    def connect(self, description):
        self.made.append(HangingRoute(super().connect(description).pid, self.end))
        return self.made[-1]


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(module, "GIVE_UP_S", 0.05)
    end, made = End(), []
    spec = TransportSpec(
        name="hanging",
        summary="never ends",
        config=OneSidedConfig,
        factory=lambda config: OneSidedTransport("hanging", HangingNative(end, made), config, "nothing"),
    )
    pair = TransportPair(spec, OneSidedConfig())
    yield pair, end, made
    pair.close()


def started(pair):
    target = pair.target(4096)
    transfer = pair.post(target, [WriteOp(pair.source(b"x" * 4096), 0, 0, 4096)])
    until(lambda: target.region.view[0] == ord("x"), "the write")
    return target, transfer


def test_an_abort_that_proves_nothing_says_so(world):
    pair, _, made = world
    _, transfer = started(pair)
    assert transfer.abort() is False
    assert transfer.wait(20) is TransferState.ABORTED
    assert made[0].closed, "the way to the target is dropped"


def test_an_abort_waits_for_what_is_under_way(world, monkeypatch):
    monkeypatch.setattr(module, "GIVE_UP_S", 30)
    pair, end, made = world
    _, transfer = started(pair)
    threading.Timer(0.05, end.set).start()
    assert transfer.abort() is True
    assert not made[0].closed


def test_the_memory_of_a_write_that_did_not_end_is_not_used_again(world):
    pair, _, _ = world
    target, transfer = started(pair)
    transfer.abort()
    transfer.wait(20)
    address = target.region.address
    pair.node.unregister(target.region.id)
    fresh = [pair.node.allocate(4096) for _ in range(5)]
    assert all(region.address != address for region in fresh)


def test_a_closed_peer_does_not_wait_for_ever(world):
    pair, _, _ = world
    _, transfer = started(pair)
    pair.peer.close()
    assert transfer.wait(20) is TransferState.FAILED


@pytest.mark.parametrize("error", [TransferFailed("broken"), StillUnderWay("gave up")])
def test_what_the_library_says_is_the_error(world, error):
    pair, end, made = world
    _, transfer = started(pair)
    end.error = error
    end.set()
    assert transfer.wait(20) is TransferState.FAILED
    assert transfer.error is error
    assert transfer.abort() is False, "what had left already may still arrive"
    until(lambda: bool(made[0].closed) is isinstance(error, StillUnderWay), "dropping the way")


def ended_memory_is_not_reused(pair, target):
    address = target.region.address
    pair.node.unregister(target.region.id)
    until(lambda: not pair.node._landings._freed, "the writer's answer")
    return all(pair.node.allocate(4096).address != address for _ in range(5))


def test_the_memory_of_a_write_that_broke_is_not_used_again(world):
    pair, end, _ = world
    target, transfer = started(pair)
    end.error = TransferFailed("broken")
    end.set()
    assert transfer.wait(20) is TransferState.FAILED
    assert ended_memory_is_not_reused(pair, target)


def test_the_memory_of_a_write_that_was_repeated_is_not_used_again(world, monkeypatch):
    pair, end, _ = world
    target, transfer = started(pair)
    monkeypatch.setattr(Hanging, "unproven", True)
    end.set()
    assert transfer.wait(20) is TransferState.DONE
    pair.write(target, b"z" * 4096)  # the grant still works
    assert ended_memory_is_not_reused(pair, target)


def test_the_memory_of_a_write_that_ended_well_is_used_again(world):
    pair, end, _ = world
    target, transfer = started(pair)
    end.set()
    assert transfer.wait(20) is TransferState.DONE
    assert not ended_memory_is_not_reused(pair, target)


def test_a_dropped_way_is_made_anew(world):
    pair, end, made = world
    _, transfer = started(pair)
    transfer.abort()
    end.set()
    until(lambda: pair.peer._link.over, "the link's end")
    pair.peer = pair.sender.connect(pair.node.export_metadata())
    pair.write(pair.target(100), b"y" * 100)
    assert len(made) == 2
