"""Messages and metadata of the control connection."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import PeerMetadata, TransferFailed
from pdhub.onesided.wire import MAX_EXTRA, TOKEN_BYTES, Address, Inbox, Kind, Message

number = st.integers(0, (1 << 64) - 1)
messages = st.builds(
    Message,
    st.sampled_from(Kind),
    st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES),
    number,
    number,
    number,
    st.binary(max_size=200),
)


@given(st.lists(messages, max_size=5), st.lists(st.integers(1, 150), max_size=20))
@settings(deadline=None, max_examples=60)
def test_messages_survive_any_cut(sent, sizes):
    stream, inbox, got = b"".join(m.pack() for m in sent), Inbox(), []
    for size in [*sizes, len(stream)]:
        part, stream = stream[:size], stream[size:]
        got += inbox.take(part)
    assert got == sent


@pytest.mark.parametrize(
    "stream",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 10,
        Message(Kind.OPEN, bytes(32)).pack().replace(b"pdhub1s", b"pdhub2s"),
        Message(Kind.OPEN, bytes(32)).pack()[:-4] + (MAX_EXTRA + 1).to_bytes(4, "big"),
        Message(Kind.OPEN, bytes(32)).pack().replace(b"\0\0\1\3", b"\0\0\1\x63"),
    ],
)
def test_other_streams_are_refused(stream):
    with pytest.raises(ValueError):
        list(Inbox().take(stream))


def test_metadata_comes_back_and_garbage_is_refused():
    address = Address("host", 5, bytes(range(32)), b"\x00native")
    assert Address.unpack("x", address.pack("x")) == address
    good = address.pack("x").data
    for bad in (
        address.pack("y"),
        PeerMetadata("x", b""),
        PeerMetadata("x", b"[]"),
        PeerMetadata("x", b"\xff\xfe"),
        PeerMetadata("x", good.replace(b'"protocol": 1', b'"protocol": 2')),
        PeerMetadata("x", good.replace(b"000102", b"0001")),
    ):
        with pytest.raises(TransferFailed):
            Address.unpack("x", bad)
