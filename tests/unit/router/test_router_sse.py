"""The relay changes no byte, whatever the chunking, and knows how a stream ended."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.router.sse import Renamer, StreamWatch


def event(**members):
    return b"data: " + json.dumps(members).encode() + b"\n\n"


def chunk(text=None, finish=None, **more):
    delta = {} if text is None else {"content": text}
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish}], **more)


GOOD = b"".join(
    [
        b": hello\n\n",
        chunk(""),
        chunk('a "quoted" \u00e9\\n[DONE]'),
        chunk("\n\ndata: [DONE]\n\n"),
        chunk(None, "stop", usage=None),
        event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}),
        b"data: [DONE]\n\n",
    ]
)


def run(pieces):
    watch = StreamWatch()
    out = b"".join(watch.feed(piece) for piece in pieces)
    return out + watch.rest(), watch


def cut(data, cuts):
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(GOOD)), max_size=15), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_bytes_pass_unchanged(cuts, newline):
    data = GOOD.replace(b"\n", newline)
    out, watch = run(cut(data, cuts))
    assert out == data
    assert watch.done
    assert watch.finished
    assert watch.texts == 2
    assert watch.usage == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert watch.error is None


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_any_bytes_leave_whole_events_only(data, cuts):
    watch = StreamWatch()
    out = b"".join(watch.feed(piece) for piece in cut(data, cuts))
    assert data.startswith(out)
    assert not out or out[-1:] in b"\r\n"


def test_a_stream_that_breaks_off_ends_on_an_event_boundary():
    whole = chunk("hello") + chunk("world")
    out, watch = run([whole + b'data: {"choices": [{"del'])
    assert out == whole
    assert not watch.done
    assert not watch.finished


def test_a_last_event_without_its_blank_line_counts():
    data = chunk("x") + b"data: [DONE]"
    out, watch = run([data])
    assert out == data
    assert watch.done


def test_finish_reason_without_end_mark():
    out, watch = run([chunk("x", "length")])
    assert watch.finished
    assert not watch.done
    assert out == chunk("x", "length")


@pytest.mark.parametrize("error", [{"message": "boom", "code": 500}, "boom"])
def test_an_error_event_is_kept_back(error):
    first = chunk("x")
    out, watch = run([first + event(error=error) + chunk("never")])
    assert out == first
    assert watch.error["message"] == "boom"


def test_text_about_errors_is_no_error():
    out, watch = run([chunk('{"error": 1}') + event(error=None, choices=[{"text": "x"}])])
    assert watch.error is None
    assert out


def test_the_model_is_renamed_and_nothing_else():
    text = json.dumps('"model":"up" "model": "up"')[1:-1]
    data = b'data: {"model": "up", "x": {"content": "' + text.encode() + b'"}, "n":"up"}\n\n'
    assert Renamer("up", "me")(data) == data.replace(b'"model": "up", "x"', b'"model": "me", "x"')
