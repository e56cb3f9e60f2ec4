"""Small parts: refusals, results of prefill, ids, records, errors, the janitor."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import (
    AdmissionRejected,
    EngineFailed,
    InvalidRequest,
    LayoutMismatch,
    LeaseExpired,
    TokenLogprob,
    TransferFailed,
)
from pdhub.router.breaker import Breaker
from pdhub.router.endpoint import Endpoint
from pdhub.router.errors import LandingTooSmall, Refused, UpstreamTimeout, event_of, reply_of, status_of
from pdhub.router.flight import Flight, new_id, safe_id
from pdhub.router.janitor import Janitor
from pdhub.router.refusal import classify, from_event
from pdhub.router.result import read_result
from pdhub.wire.errors import BodyTooLarge

RULES = None  # nothing here looks at them


def endpoint(hosted):
    return Endpoint("n", "http://h:1", breaker=Breaker(1, 1, 1), probe_failures=2, hosted=hosted)


def body(code, **more):
    return json.dumps({"error": {"message": "text", "code": code, **more}}).encode()


@pytest.mark.parametrize(
    ("status", "raw", "hosted", "kind"),
    [
        (409, body("landing_too_small", need=9), True, LandingTooSmall),
        (409, body("landing_too_small", need="9"), True, EngineFailed),
        (409, body("landing_too_small", need=9), False, Refused),
        (404, body("unknown_transfer"), True, TransferFailed),
        (409, body("stale_generation"), True, TransferFailed),
        (502, body("layout_mismatch"), True, LayoutMismatch),
        (504, body("lease_expired"), True, LeaseExpired),
        (502, body("lease_expired"), False, EngineFailed),
        (400, body("x"), True, Refused),
        (400, b"not json", False, EngineFailed),
        (400, b'"text"', False, EngineFailed),
        (401, body("x"), False, EngineFailed),
        (429, body("x"), False, AdmissionRejected),
        (503, body("x"), True, AdmissionRejected),
        (503, body("x"), False, EngineFailed),
        (302, b"", False, EngineFailed),
    ],
)
def test_what_a_status_means(status, raw, hosted, kind):
    assert type(classify(status, raw, {}, endpoint(hosted))) is kind


@settings(max_examples=150, deadline=None)
@given(st.integers(100, 999), st.binary(max_size=40) | st.text(max_size=20).map(lambda t: body(t)), st.booleans())
def test_any_status_and_body_is_some_error(status, raw, hosted):
    error = classify(status, raw, {"retry-after": "soon"}, endpoint(hosted))
    reply = reply_of(error)
    assert 400 <= reply.status < 600 or isinstance(error, LandingTooSmall)
    assert not hosted or reply.status != 401


def test_errors_in_events_have_a_status():
    assert status_of(from_event({"message": "x", "code": 404}, endpoint(False))) == 404
    assert status_of(from_event({"message": "x", "type": "BadRequestError"}, endpoint(False))) == 400
    assert status_of(from_event({"message": "x"}, endpoint(False))) == 502
    assert status_of(from_event({"message": "x", "code": True}, endpoint(False))) == 502


def test_error_replies():
    assert reply_of(BodyTooLarge("x")).status == 413
    assert reply_of(UpstreamTimeout("x")).status == 504
    assert b"secret" not in reply_of(RuntimeError("secret")).body
    refused = Refused(422, b"{raw}", "application/json; x", code="c", message="m")
    assert (reply_of(refused).body, reply_of(refused).headers["content-type"]) == (b"{raw}", "application/json; x")
    event = event_of(InvalidRequest("x", param="p"))
    assert event.startswith(b'data: {"error":')
    assert event.endswith(b"}\n\n")
    assert json.loads(event[6:])["error"]["status"] == 400


CHOICE = {"token_ids": [7], "prompt_token_ids": [1, 2]}


def test_prefill_results():
    result = read_result({"choices": [CHOICE], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}})
    assert (result.first_token, result.prompt_token_ids, result.cached_tokens) == (7, (1, 2), 1)
    chat = {
        "content": [{"token": "token_id:7", "logprob": -1, "top_logprobs": [{"token": "token_id:9", "logprob": -2}]}]
    }
    assert read_result({"choices": [{**CHOICE, "logprobs": chat}]}).first_logprob == TokenLogprob(7, -1.0, ((9, -2.0),))
    text = {"tokens": ["token_id:7"], "token_logprobs": [-1], "top_logprobs": [{"token_id:9": -2, "token_id:7": -1}]}
    assert read_result({"choices": [{**CHOICE, "logprobs": text}]}).first_logprob.top == ((7, -1.0), (9, -2.0))
    exact = {**CHOICE, "logprobs": chat, "pdhub_logprob": [7, -0.5, []]}
    assert read_result({"choices": [exact]}).first_logprob == TokenLogprob(7, -0.5)
    assert read_result({"choices": [{}]}).first_token is None


@pytest.mark.parametrize(
    "answer",
    [{}, {"choices": []}, {"choices": 3}, {"choices": [3]}, {"choices": [{"token_ids": ["a"]}]},
     {"choices": [{"token_ids": [True]}]}, {"choices": [{**CHOICE, "logprobs": {"tokens": ["x"]}}]},
     {"error": {"m": 1}},
     {"choices": [CHOICE], "usage": 3}],
)  # fmt: skip
def test_a_prefill_answer_of_another_shape_is_a_failure(answer):
    with pytest.raises(EngineFailed):
        read_result(answer)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300))
def test_client_ids_are_safe_to_echo(text):
    safe = safe_id(text)
    assert len(safe) <= 128
    assert safe.isascii()
    assert not set(safe) & set("\r\n\"'<> ;,")


def test_ids_are_unique_and_clients_choose_none():
    assert len({new_id() for _ in range(100)}) == 100
    one, two = (Flight.begin({"x-request-id": "same", "traceparent": "bad"}, 0.0, RULES) for _ in range(2))
    assert one.id != two.id
    assert one.shown_id == "same"
    assert one.trace == {}


def test_records_count_what_arrived():
    flight = Flight("r", 10.0, RULES)
    flight.tokens(1, 10.5)
    flight.tokens(4, 11.5)
    record = flight.record("ok", None, 12.0)
    assert (record.ttft_ms, record.tpot_ms, record.total_ms) == (500.0, 250.0, 2000.0)
    flight.restart()
    assert flight.record("error", "x", 12.0).ttft_ms is None


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


async def test_the_janitor_waits_for_the_claim_and_is_bounded():
    results = []
    janitor = Janitor(results.append)
    claim = asyncio.get_running_loop().create_future()
    sent = []

    async def send():
        sent.append(claim.done())

    janitor.cancel(send, claim)
    await asyncio.sleep(0.01)
    assert sent == []
    claim.set_exception(EngineFailed("late"))
    await janitor.close()
    assert sent == [True]
    assert results == ["sent"]

    async def never():
        await asyncio.sleep(3600)

    janitor.cancel(never)
    await janitor.close(within_s=0.05)
