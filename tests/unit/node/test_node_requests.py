"""Bytes from the router: every one gives a checked message or an InvalidRequest, never anything else."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import InvalidRequest, Sampling, TokenLogprob
from pdhub.node.validate import cancel_body, claim_body, decode_body
from pdhub.wire.http import ClaimBody, DecodeBody, SamplingBody, to_json

GOOD = DecodeBody(
    transfer_id="t",
    generation=3,
    request_id="r",
    prompt_token_ids=[1, 2],
    first_token=5,
    max_tokens=4,
    sampling=SamplingBody(temperature=0.5, seed=7, logit_bias={"12": -1.5}),
    first_logprob=(5, -0.5, [(5, -0.5), (6, -1.0)]),
    min_tokens=2,
    ignore_eos=True,
    stop_token_ids=[9],
    logprobs=2,
)


def test_a_decode_body_becomes_the_engines_request():
    body, request = decode_body(to_json(GOOD))
    assert body == GOOD
    assert request.prompt_token_ids == (1, 2)
    assert request.sampling == Sampling(temperature=0.5, seed=7, logit_bias={12: -1.5})
    assert request.first_logprob == TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.0)))
    assert (request.min_tokens, request.ignore_eos, request.stop_token_ids, request.logprobs) == (2, True, (9,), 2)


def test_unknown_members_are_ignored_so_that_a_newer_router_may_add_some():
    body = json.loads(to_json(GOOD)) | {"tomorrow": 1}
    assert decode_body(json.dumps(body).encode())[0] == GOOD


@pytest.mark.parametrize("parse", [claim_body, decode_body, cancel_body])
@settings(deadline=None, max_examples=150)
@given(data=st.binary(max_size=60))
def test_any_bytes(parse, data):
    with pytest.raises(InvalidRequest):
        parse(data)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(deadline=None, max_examples=300)
@given(kind=st.sampled_from([ClaimBody, DecodeBody]), data=st.data(), value=values)
def test_any_value_of_any_member(kind, data, value):
    good = GOOD if kind is DecodeBody else ClaimBody("t", "r", 5, 5, "f")
    name = data.draw(st.sampled_from(good.__struct_fields__))
    body = json.loads(to_json(good)) | {name: value}
    parse = decode_body if kind is DecodeBody else claim_body
    try:
        parse(json.dumps(body).encode())
    except InvalidRequest:
        return


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1"])
def test_numbers_that_are_no_times(number):
    good = to_json(ClaimBody("t", "r", 5, 5, "f", ttl_s=12.5)).replace(b"12.5", number.encode())
    with pytest.raises(InvalidRequest):
        claim_body(good)
