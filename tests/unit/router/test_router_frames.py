"""A node's stream means the same however it is cut."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import (
    AdmissionRejected,
    EngineFailed,
    Finished,
    FinishReason,
    InvalidRequest,
    LeaseExpired,
    TokenChunk,
    TokenLogprob,
    TransferFailed,
)
from pdhub.router.clients.frames import NodeFrames
from pdhub.wire.http import Done, ErrorBody, Frame, Started, to_json

FRAMES = [
    Frame(s=Started(handoff_ms=3.5, wait_ms=0.5, kv_bytes=4096)),
    Frame(t=[7], lp=[(7, -0.5, [(7, -0.5), (9, -1.5)])]),
    Frame(t=[8, 9], lp=[(8, -0.1, []), (9, -0.2, [])]),
    Frame(done=Done("stop", 3, 9)),
]
STREAM = b"".join(to_json(f) + b"\n" for f in FRAMES)
ITEMS = [
    TokenChunk((7,), (TokenLogprob(7, -0.5, ((7, -0.5), (9, -1.5))),)),
    TokenChunk((8, 9), (TokenLogprob(8, -0.1), TokenLogprob(9, -0.2))),
    Finished(FinishReason.STOP, 3, 9),
]


def feed_all(pieces):
    parser = NodeFrames()
    items = [item for piece in pieces for item in parser.feed(piece)]
    parser.eof()
    return items, parser.stats()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_chunking(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    items, stats = feed_all([STREAM[a:b] for a, b in pairwise(edges)])
    assert items == ITEMS
    assert stats == {"handoff_ms": 3.5, "wait_ms": 0.5, "kv_bytes": 4096.0}


def test_byte_by_byte():
    assert feed_all([bytes([b]) for b in STREAM])[0] == ITEMS


def test_an_end_without_the_last_frame_is_a_failure():
    for end in range(len(STREAM)):
        parser = NodeFrames()
        parser.feed(STREAM[:end])
        with pytest.raises(EngineFailed):
            parser.eof()


@pytest.mark.parametrize(
    "line", [b"{}x\n", b"nonsense\n", b'{"t":"x"}\n', b'{"done":{"reason":"bored","n":0}}\n', b"[" * 9999 + b"\n"]
)
def test_what_is_no_frame_is_a_failure(line):
    with pytest.raises(EngineFailed):
        NodeFrames().feed(line)


def test_a_wrong_count_and_a_frame_too_many_are_failures():
    parser = NodeFrames()
    with pytest.raises(EngineFailed):
        parser.feed(to_json(Frame(done=Done("stop", 5))) + b"\n")
    parser = NodeFrames()
    parser.feed(STREAM)
    with pytest.raises(EngineFailed):
        parser.feed(STREAM)


def test_a_line_without_an_end_is_bounded():
    parser = NodeFrames()
    for _ in range(NodeFrames.max_line // 1000):
        parser.feed(b"x" * 1000)
    with pytest.raises(EngineFailed):
        parser.feed(b"x" * 1000)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ErrorBody("m", "transfer_failed"), TransferFailed),
        (ErrorBody("m", "lease_expired"), LeaseExpired),
        (ErrorBody("m", "invalid_request", "invalid_request_error", "seed"), InvalidRequest),
        (ErrorBody("m", "admission_rejected", "rate_limit_error"), AdmissionRejected),
        (ErrorBody("m", "who_knows"), EngineFailed),
    ],
)
def test_error_frames_come_back_as_their_class(error, kind):
    with pytest.raises(kind) as caught:
        NodeFrames().feed(to_json(Frame(error=error)) + b"\n")
    assert caught.value.message == "m"
    assert caught.value.param == error.param or kind is AdmissionRejected
