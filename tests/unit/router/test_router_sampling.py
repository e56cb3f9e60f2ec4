"""Sampling is resolved once, and the same for both legs."""

import dataclasses

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import Feature, Sampling
from pdhub.router.clients.node import NodeClient
from pdhub.router.sampling import features_of, members_of, resolve, with_seed

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}


def test_the_client_wins_over_the_model_and_the_model_over_openai():
    assert resolve({}, {}) == Sampling()
    assert resolve({}, DEFAULTS) == Sampling(temperature=0.6, top_p=0.9, top_k=20)
    sampling = resolve({"temperature": 1, "top_k": None, "logit_bias": {"5": -1}, "seed": 3}, DEFAULTS)
    assert sampling == Sampling(temperature=1.0, top_p=0.9, top_k=20, seed=3, logit_bias={5: -1.0})
    assert resolve({"top_k": -1}, DEFAULTS).top_k == 0


def test_greedy_asks_for_no_randomness():
    sampling = resolve({"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 9, "presence_penalty": 1}, DEFAULTS)
    assert sampling == Sampling(temperature=0.0, presence_penalty=1.0)
    assert features_of(sampling) == {Feature.PRESENCE_PENALTY}


def test_features():
    assert features_of(Sampling(temperature=0.0)) == frozenset()
    assert features_of(Sampling()) == {Feature.SAMPLING}
    full = Sampling(0.5, 0.9, 4, 0.1, 1.0, 1.0, 1.1, 7, {1: 2.0})
    assert len(features_of(full)) == 8


def test_a_seed_is_drawn_only_for_engines_that_can_use_it():
    able = frozenset({Feature.SEED, Feature.SAMPLING})
    drawn = with_seed(Sampling(), able)
    assert drawn.seed is not None
    assert dataclasses.replace(drawn, seed=None) == Sampling()
    assert drawn.seed != with_seed(Sampling(), able).seed
    assert with_seed(Sampling(), frozenset({Feature.SAMPLING})).seed is None
    assert with_seed(Sampling(temperature=0.0), able).seed is None
    assert with_seed(Sampling(seed=0), able).seed == 0


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0.01, 1),
            "top_k": st.integers(-1, 100),
            "min_p": st.floats(0, 1),
            "presence_penalty": st.floats(-2, 2),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "logit_bias": st.dictionaries(st.integers(0, 1000).map(str), st.integers(-100, 100), max_size=3),
        },
    )
)
def test_the_prefill_leg_reads_back_what_the_decode_leg_gets(body):
    sampling = resolve(body, DEFAULTS)
    assert resolve(members_of(sampling), {"temperature": 0.1, "top_k": 1, "min_p": 0.5}) == sampling


def test_the_node_client_is_pure_enough_to_encode():
    call = NodeClient().load(None)
    assert msgspec.json.encode(dict(call.set)) == b"{}"
