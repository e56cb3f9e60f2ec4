"""When the memory of a landing may carry the next one: ``docs/adr/0002-shm-fencing.md``, case by case."""

import socket
import time

import pytest

from pdhub.api import WriteOp
from pdhub.testing.transport_kit.pair import TransportPair, until
from pdhub.transports.plugin import ShmConfig, pdhub_register_transports
from pdhub.transports.shm_wire import PACKET_BYTES, Kind, pack, read_metadata, unpack

SIZE = 1 << 20


@pytest.fixture
def pair():
    (spec,) = (spec for spec in pdhub_register_transports() if spec.name == "shm")
    pair = TransportPair(spec, ShmConfig())
    yield pair
    pair.close()


def reused(pair, address: int) -> bool:
    """The next landing lies where the last one did."""
    region = pair.node.allocate(SIZE)
    found = region.address == address
    pair.node.unregister(region.id)
    return found


def use(pair):
    target = pair.target(SIZE)
    pair.write(target, b"x" * SIZE)
    return target.region


class RawWriter:
    """Speaks the protocol by hand, to break it."""

    def __init__(self, pair):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(5)
        self.sock.connect(read_metadata(pair.node.export_metadata()))

    def open(self, grant):
        self.sock.send(pack(Kind.OPEN, grant.data))
        packet, fds, _, _ = socket.recv_fds(self.sock, PACKET_BYTES, 1)
        for fd in fds:
            socket.close(fd)
        return unpack(packet)


def test_returned_memory_is_reused(pair):
    address = use(pair).address
    for region_id in list(pair.node._target._segments):
        pair.node.unregister(region_id)
    until(lambda: reused(pair, address), "reuse after the writer returned its grant")


def test_a_closed_peer_has_returned_its_grants(pair):
    region = use(pair)
    pair.peer.close()
    pair.node.unregister(region.id)
    until(lambda: reused(pair, region.address), "reuse after the peer was closed")


def test_never_opened_memory_is_reused_at_once(pair):
    target = pair.target(SIZE)
    pair.node.unregister(target.region.id)
    assert reused(pair, target.region.address)


def test_a_fence_of_an_unopened_region_costs_nothing(pair):
    target = pair.target(SIZE)
    assert pair.node.fence(target.region.id, 1)
    pair.node.unregister(target.region.id)
    assert reused(pair, target.region.address)


def test_fenced_memory_that_a_writer_opened_is_not_reused(pair):
    region = use(pair)
    serial = pair.node._target._segments[region.id].memory.serial
    assert pair.node.fence(region.id, 1)
    pair.node.unregister(region.id)
    time.sleep(0.02)
    fresh = pair.node.allocate(SIZE)
    assert pair.node._target._segments[fresh.id].memory.serial != serial


def test_memory_of_a_writer_that_vanished_is_not_reused(pair):
    target = pair.target(SIZE)
    serial = pair.node._target._segments[target.region.id].memory.serial
    writer = RawWriter(pair)
    assert writer.open(target.grant)[0] is Kind.OPENED
    pair.node.unregister(target.region.id)
    writer.sock.close()
    until(lambda: not pair.node._target._freed, "the end of the freed segment")
    fresh = pair.node.allocate(SIZE)
    assert pair.node._target._segments[fresh.id].memory.serial != serial


def test_memory_of_a_writer_that_does_not_answer_waits(pair):
    target = pair.target(SIZE)
    writer = RawWriter(pair)
    writer.open(target.grant)
    pair.node.unregister(target.region.id)
    assert unpack(writer.sock.recv(PACKET_BYTES))[0] is Kind.RECALL
    assert not reused(pair, target.region.address)
    writer.sock.send(pack(Kind.RETURNED, target.grant.data))
    until(lambda: reused(pair, target.region.address), "reuse after the late return")
    writer.sock.close()


def test_a_writer_that_reads_nothing_loses_its_connection(pair):
    writer = RawWriter(pair)

    def flood():
        for _ in range(3000):
            target = pair.target(4096)
            writer.sock.send(pack(Kind.OPEN, target.grant.data))
            pair.node.unregister(target.region.id)

    with pytest.raises(OSError):
        flood()
    use(pair)  # everybody else goes on
    writer.sock.close()


@pytest.mark.parametrize("packet", [b"x", b"", bytes(PACKET_BYTES), pack(Kind.FORGET), b"\xff" * PACKET_BYTES])
def test_nonsense_ends_only_its_own_connection(pair, packet):
    writer = RawWriter(pair)
    if packet:
        writer.sock.send(packet)
    else:
        writer.sock.shutdown(socket.SHUT_WR)
    assert writer.sock.recv(1) == b""
    writer.sock.close()
    use(pair)


def test_a_landing_that_is_still_looked_at_is_not_reused(pair):
    target = pair.target(SIZE)
    look = target.region.view[:10]
    pair.node.unregister(target.region.id)
    region = pair.node.allocate(SIZE)
    assert region.address != target.region.address
    assert bytes(look) == bytes(10)


def test_use_after_free_is_an_error_not_a_wrong_answer(pair):
    region = pair.node.allocate(SIZE)
    pair.node.unregister(region.id)
    with pytest.raises(ValueError, match="released"):
        region.view[0]


def test_registered_memory_cannot_be_granted(pair):
    from pdhub.api import Region

    mine = bytearray(10)
    region = pair.node.register(Region("mine", 0, 10, view=memoryview(mine), owner=mine))
    with pytest.raises(ValueError):
        pair.node.grant(region.id, "writer")


def test_the_target_of_another_boot_is_refused(pair, monkeypatch):
    metadata = pair.node.export_metadata()
    monkeypatch.setattr("pdhub.transports.shm_wire.boot_id", lambda: "another")
    with pytest.raises(Exception, match="one host"):
        pair.sender.connect(metadata)


def test_a_slow_target_fails_the_write(pair):
    """A stopped node answers no open; the write fails after the limit and has touched nothing."""
    pair.config = ShmConfig(timeout_s=0.05)
    sender = pair.make()
    sender.open()
    target = pair.target(SIZE)
    peer = sender.connect(pair.node.export_metadata())
    with pair.node._target._lock:
        source = sender.allocate(10)
        transfer = sender.write(peer, target.grant, [WriteOp(source, 0, 0, 10)])
        assert transfer.wait(5) == "failed"
    assert "did not open" in str(transfer.error)
