"""Targets out of headers, whatever the client writes there."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import SLO
from pdhub.router.slo import MAX_MS, parse_ms, read_slo


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("250", 250.0), ("3.5", 3.5), (" 20 ", 20.0), (".5", 0.5), ("7.", 7.0), ("00012", 12.0),
        ("999999999999999", MAX_MS), ("0", None), ("0.0", None), ("-5", None), ("+5", None), ("1e3", None),
        ("nan", None), ("inf", None), ("", None), ("  ", None), ("12ms", None), ("1,5", None), ("0x10", None),
        ("١٢", None), ("1 2", None),
        ("9" * 400, None), (".", None), ("1_000", None), ("5\n", None),
    ],
)  # fmt: skip
def test_decimals_of_milliseconds(text, value):
    assert parse_ms(text) == value


def test_the_first_present_name_wins_even_if_it_is_invalid():
    both = {"x-llm-d-slo-ttft-ms": "100", "x-slo-ttft-ms": "200", "x-slo-tpot-ms": "7"}
    assert read_slo(both) == SLO(ttft_ms=100.0, tpot_ms=7.0)
    assert read_slo({**both, "x-llm-d-slo-ttft-ms": ""}).ttft_ms is None
    assert read_slo({}) == SLO()


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30) | st.floats().map(str) | st.integers().map(str))
def test_anything_else_is_no_target(text):
    value = parse_ms(text)
    assert value is None or (0 < value <= MAX_MS and math.isfinite(value))
