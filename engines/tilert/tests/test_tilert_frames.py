"""The stream of a decode server, however it is cut, and what its last line means."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdhub_tilert.frames import TileRTFrames
from pdhub_tilert.refusals import error_of

from pdhub.api import (
    AdmissionRejected,
    EngineFailed,
    Finished,
    FinishReason,
    InvalidRequest,
    RequestCancelled,
    TokenChunk,
    TokenLogprob,
    TransferFailed,
    Unsupported,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def line(**members):
    return json.dumps(members).encode() + b"\n"


def done(n, reason="stop", **timing):
    return line(done=True, n=n, seq_len=5, finish_reason=reason, timing_ms={"finish_reason": reason, **timing})


def read(data, cuts=(), **options):
    parser = TileRTFrames(options.pop("first", 7), options.pop("max_tokens", 99), **options)
    items, edges = [], [0, *sorted(cuts), len(data)]
    for a, b in pairwise(edges):
        items += parser.feed(data[a:b])
    parser.eof()
    return items, parser


def tokens_of(items):
    return [t for item in items if isinstance(item, TokenChunk) for t in item.token_ids]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 200_000), min_size=1, max_size=5), max_size=6), st.data())
def test_chunks_of_any_size_give_the_same_tokens(chunks, data):
    ids = [7, *(t for chunk in chunks for t in chunk)]
    raw = b"".join([line(t=[7]), *(line(t=chunk) for chunk in chunks), done(len(ids), "length")])
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=8))
    items, _ = read(raw, cuts)
    assert tokens_of(items) == ids
    assert items[-1] == Finished(LENGTH, len(ids))


@pytest.mark.parametrize("sent", [line(t=[7]), b""], ids=["cuda", "rocm"])
def test_a_first_token_that_ends_the_answer_counts_whether_it_was_sent_or_not(sent):
    items, _ = read(sent + done(0))
    assert tokens_of(items) == [7]
    assert items[-1] == Finished(STOP, 1, 7)


@pytest.mark.parametrize(
    ("count", "said", "most", "meant"),
    [(2, "stop", 9, STOP), (2, "stop", 2, LENGTH), (2, "length", 9, LENGTH), (1, "stop", 1, LENGTH)],
)
def test_an_answer_as_long_as_it_may_be_ended_by_length(count, said, most, meant):
    items, _ = read(line(t=list(range(7, 7 + count))) + done(count, said), max_tokens=most)
    assert items[-1] == Finished(meant, count)


def test_the_record_knows_how_long_the_hand_over_took():
    _, parser = read(line(t=[7]) + done(1, wire_wait=2.5, convert=30.0, inject=1.0, decode=99.0), kv_bytes=4096)
    assert parser.stats() == {"kv_bytes": 4096.0, "handoff_ms": 33.5}


def test_the_first_log_probability_is_prefills():
    mine = TokenLogprob(7, -0.25, ((7, -0.25),))
    rows = {"lp": [None, -1.0], "tp": [[], [[8, -1.0], [9, -2.0]]]}
    items, _ = read(line(t=[7, 8], **rows) + done(2), first_logprob=mine, logprobs=1)
    assert items[0].logprobs == (mine, TokenLogprob(8, -1.0, ((8, -1.0),)))


@pytest.mark.parametrize(
    "raw",
    [
        b"no json\n", b"[1]\n", b'{"x": 1}\n', line(t=[]), line(t=["7"]), line(t=[True]), line(t=[8]),
        line(t=[7]) + done(2), line(t=[7, 8]) + done(0), line(t=[7]) + done(1, "tired"),
        done(0) + line(t=[7]), line(t=[7]) + line(error="decode stalled"), line(error=None),
    ],
)  # fmt: skip
def test_what_is_no_stream_is_a_failure_of_the_engine(raw):
    with pytest.raises(EngineFailed):
        read(raw)


@pytest.mark.parametrize("rows", [{}, {"lp": [None], "tp": [[]]}, {"lp": [-1.0], "tp": []}, {"lp": "x", "tp": "y"}])
def test_missing_log_probabilities_are_a_failure(rows):
    with pytest.raises(EngineFailed):
        read(line(t=[7], **rows) + done(1), logprobs=1)


def test_a_stream_without_its_last_line_is_a_failure():
    parser = TileRTFrames(7, 9)
    parser.feed(line(t=[7]))
    with pytest.raises(EngineFailed):
        parser.eof()


def test_an_answer_that_was_cancelled_is_no_answer():
    with pytest.raises(RequestCancelled):
        read(line(t=[7]) + done(1, "cancelled"))


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (429, {"error": "busy", "current_rid": "x"}, AdmissionRejected),
        (501, {"error": "seed is not supported", "error_type": "capability_unavailable"}, Unsupported),
        (501, {"error": "no", "error_type": "grammar_unsupported"}, Unsupported),
        (200, {"error": "no", "error_type": "logprobs_unavailable"}, Unsupported),
        (400, {"error": "top_p must be a number", "error_type": "invalid_parameter"}, InvalidRequest),
        (499, {"error": "cancelled", "error_type": "request_cancelled"}, RequestCancelled),
        (504, {"error": "kv_transfer_timeout", "rid": "x"}, TransferFailed),
        (500, {"error": "CUDA error: …"}, EngineFailed),
        (404, {"error": "no matching in-flight request"}, type(None)),
        (422, {"detail": []}, type(None)),
    ],
)
def test_refusals_say_what_they_mean_and_nothing_of_the_inside(status, body, kind):
    error = error_of(body, status)
    assert type(error) is kind
    if kind is EngineFailed:
        assert "CUDA" not in error.message
