"""Writers that break the protocol harm nobody but themselves."""

import contextlib
import socket
import time

import pytest
from pydantic import ValidationError

from pdhub.api import PluginError
from pdhub.testing.transport_kit.pair import TransportPair, holds, pattern, peek, until
from pdhub.transports.plugin import TcpConfig, pdhub_register_transports
from pdhub.transports.tcp_wire import (
    ACK,
    ANSWER,
    FRAME,
    HELLO,
    MAGIC,
    PROTOCOL,
    Kind,
    Purpose,
    Status,
    read_metadata,
)

GUARD = b"\xa5"
SIZE = 100_000


@pytest.fixture
def config():
    return TcpConfig(timeout_s=1.0, max_connections=4)


@pytest.fixture
def pair(config):
    (spec,) = (spec for spec in pdhub_register_transports() if spec.name == "tcp")
    pair = TransportPair(spec, config)
    yield pair
    pair.close()


@pytest.fixture
def dial(pair):
    made = []

    def connect(hello: bytes = b"") -> socket.socket:
        sock = socket.create_connection(read_metadata(pair.node.export_metadata()), timeout=5)
        made.append(sock)
        sock.sendall(hello)
        return sock

    yield connect
    for sock in made:
        sock.close()


def hello(token: bytes, *, magic: bytes = MAGIC, protocol: int = PROTOCOL) -> bytes:
    return HELLO.pack(magic, protocol, Purpose.WRITE, token)


def ended(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def still_works(pair) -> None:
    target = pair.target(SIZE)
    pair.write(target, pattern(SIZE))
    assert holds(target.region, pattern(SIZE))
    pair.node.unregister(target.region.id)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, SIZE + 1), (SIZE, 1), (SIZE - 1, 2), (1 << 63, 1), ((1 << 64) - 1, (1 << 64) - 1), (0, 1 << 63)],
)
def test_a_frame_that_leaves_the_region_ends_the_connection(pair, dial, offset, length):
    target, behind = pair.target(SIZE, 0xA5), pair.target(SIZE, 0xA5)
    sock = dial(hello(target.grant.data))
    assert ANSWER.unpack(sock.recv(ANSWER.size)) == (Status.OK, SIZE)
    sock.sendall(FRAME.pack(Kind.DATA, offset, length) + b"x" * 100)
    assert ended(sock)
    assert peek(target.region) == peek(behind.region) == GUARD * SIZE
    still_works(pair)


@pytest.mark.parametrize(
    ("greeting", "status"),
    [
        (hello(bytes(32)), Status.UNKNOWN_GRANT),
        (hello(bytes(32), magic=b"GET / HT"), Status.PROTOCOL),
        (hello(bytes(32), protocol=99), Status.PROTOCOL),
    ],
)
def test_strangers_are_told_and_sent_away(pair, dial, greeting, status):
    sock = dial(greeting)
    assert ANSWER.unpack(sock.recv(ANSWER.size))[0] == status
    assert ended(sock)
    still_works(pair)


def test_an_unknown_frame_ends_the_connection(pair, dial):
    target = pair.target(SIZE)
    sock = dial(hello(target.grant.data))
    sock.recv(ANSWER.size)
    sock.sendall(FRAME.pack(77, 0, 0))
    assert ended(sock)


def test_a_silent_stranger_is_dropped_in_time(dial):
    assert ended(dial(b"pd"))


def test_connections_are_bounded_and_come_back(pair, dial):
    silent = [dial() for _ in range(4)]
    until(lambda: len(pair.node._target._connections) == 4, "four connections")
    assert ended(dial()), "one more is closed at once"
    for sock in silent:
        sock.close()
    until(lambda: not pair.node._target._connections, "their end")
    still_works(pair)


def test_a_frame_that_stands_still_is_fenced(pair, dial):
    target = pair.target(SIZE, 0xA5)
    sock = dial(hello(target.grant.data))
    sock.recv(ANSWER.size)
    sock.sendall(FRAME.pack(Kind.DATA, 0, SIZE) + b"1" * 10)
    until(lambda: peek(target.region, 0, 10) == b"1" * 10, "the first bytes")
    assert pair.node.fence(target.region.id, 2)
    frozen = peek(target.region)
    with contextlib.suppress(OSError):  # the target has closed it already
        sock.sendall(b"2" * (SIZE - 10))
    time.sleep(0.02)
    assert holds(target.region, frozen), "bytes landed after the fence"


def test_the_same_grant_again_ends_the_earlier_connection(pair, dial):
    target = pair.target(SIZE, 0xA5)
    first = dial(hello(target.grant.data))
    first.recv(ANSWER.size)
    first.sendall(FRAME.pack(Kind.DATA, 0, SIZE) + b"1" * 10)
    second = dial(hello(target.grant.data))
    assert ANSWER.unpack(second.recv(ANSWER.size))[0] == Status.OK
    assert ended(first)
    second.sendall(FRAME.pack(Kind.DATA, 0, SIZE) + b"2" * SIZE + FRAME.pack(Kind.END, 7, 0))
    assert ACK.unpack(second.recv(ACK.size)) == (7,)
    assert holds(target.region, b"2" * SIZE)


def test_registered_memory_can_be_a_target(pair):
    from pdhub.api import Region
    from pdhub.testing.transport_kit.pair import Target

    mine = bytearray(SIZE)
    region = pair.node.register(Region("mine", 0, SIZE, view=memoryview(mine), owner=mine))
    pair.write(Target(region, pair.node.grant(region.id, "writer")), pattern(SIZE))
    assert mine == pattern(SIZE)


def test_a_taken_port_says_so(pair):
    _, port = read_metadata(pair.node.export_metadata())
    (spec,) = (spec for spec in pdhub_register_transports() if spec.name == "tcp")
    other = spec.factory(TcpConfig(port=port))
    other.open()
    with pytest.raises(PluginError, match=str(port)):
        other.export_metadata()
    other.close()


def test_a_wildcard_needs_an_address_to_tell():
    with pytest.raises(ValidationError, match="advertise"):
        TcpConfig(host="0.0.0.0")
    assert TcpConfig(host="0.0.0.0", advertise="10.0.0.1").advertise == "10.0.0.1"


def test_ipv6(pair):
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    pair.config = TcpConfig(host="::1")
    node = pair.make()
    node.open()
    try:
        metadata = node.export_metadata()
    except PluginError:
        pytest.skip("no IPv6 loopback")
    pair.node, pair.peer = node, pair.sender.connect(metadata)
    still_works(pair)
