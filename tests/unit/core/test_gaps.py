"""Quantiles of the gaps between tokens."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.core.gaps import Gaps


def exact(values, q):
    return sorted(values)[max(1, math.ceil(q * len(values))) - 1]


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(st.floats(1e-4, 50), st.integers(1, 6)), min_size=1, max_size=60), st.floats(0.01, 1))
def test_a_quantile_is_never_too_low_and_at_most_a_bucket_too_high(pieces, q):
    gaps, every = Gaps(), []
    for gap, tokens in pieces:
        gaps.add(gap, tokens)
        every += [gap] + [0.0] * (tokens - 1)
    wanted = exact(every, q)
    assert wanted * (1 - 1e-9) <= gaps.quantile(q) <= wanted * 1.045 + 1e-9


def test_no_gap_no_quantile_and_tokens_in_one_piece_have_none_between_them():
    gaps = Gaps()
    assert gaps.quantile(0.99) is None
    gaps.add(0.0, 7)
    assert gaps.quantile(0.99) == 0.0


def test_batches_show_in_the_tail_though_the_mean_hides_them():
    """Forty tokens every 200 ms are 5 ms a token on average."""
    gaps = Gaps()
    for _ in range(10):
        gaps.add(0.2, 40)
    assert gaps.quantile(0.5) == 0.0
    assert gaps.quantile(0.99) == pytest.approx(0.2, rel=0.045)
