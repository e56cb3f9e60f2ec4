"""Numbers that clients send, whatever they write there."""

import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.core.slo import read_slo
from pdhub.core.slo_classes import Classes
from pdhub.core.slo_values import MAX_MS, MAX_PRIORITY, MIN_MS, clean, integer, milliseconds, parse_ms


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("250", 250.0), ("3.5", 3.5), (" 20 ", 20.0), ("\t20\t", 20.0), (".5", 0.5), ("7.", 7.0), ("00012", 12.0),
        ("999999999999999", MAX_MS), ("9" * 5000, MAX_MS), ("0." + "0" * 300 + "1", MIN_MS), ("0", None), ("0.0", None),
        ("-5", None), ("-0", None), ("+5", None), ("1e3", None), ("nan", None), ("NaN", None), ("inf", None),
        ("-inf", None), ("Infinity", None), ("", None), ("  ", None), ("12ms", None), ("1,5", None), ("0x10", None),
        ("١٢", None), ("１２", None), ("²", None), ("1 2", None), ("100, 200", None), (".", None), ("1_000", None),
        ("5\n", None), ("\u00a05", None), ("5\x00", None), ("1.2.3", None),
    ],
)  # fmt: skip
def test_decimals_of_milliseconds(text, value):
    assert parse_ms(text) == value


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (250, 250.0), (3.5, 3.5), ("3.5", 3.5), (10**400, MAX_MS), (1e308, MAX_MS), (5e-324, MIN_MS), (0, None),
        (-1, None), (True, None), (False, None), (None, None), (float("nan"), None), (float("inf"), None),
        (float("-inf"), None), ([5], None), ({"ms": 5}, None), ("nan", None),
    ],
)  # fmt: skip
def test_numbers_of_a_body(raw, value):
    assert milliseconds(raw) == value


NUMBERS = st.integers().map(str) | st.floats().map(str) | st.decimals(allow_nan=True, allow_infinity=True).map(str)
TEXTS = st.text(max_size=40) | NUMBERS | st.text(st.characters(categories=["Nd", "No"]), max_size=20)


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_a_text_is_a_bounded_number_or_no_target(text):
    value = parse_ms(text)
    assert value is None or MIN_MS <= value <= MAX_MS


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10**30), st.integers(0, 10**12))
def test_a_larger_target_is_never_the_tighter_one(value, more):
    """An enormous value once overflowed into a deadline in the past, and jumped the queue."""
    smaller, larger = parse_ms(str(value)), parse_ms(str(value + more))
    assert smaller is not None
    assert larger is not None
    assert smaller <= larger
    assert milliseconds(value) == smaller


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_any_json_is_a_bounded_number_or_no_target(raw):
    value = milliseconds(raw)
    assert value is None or (MIN_MS <= value <= MAX_MS and math.isfinite(value))
    number = integer(raw)
    assert number is None or -MAX_PRIORITY <= number <= MAX_PRIORITY


HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms", "x-pdhub-slo-class",
            "x-llm-d-inference-objective", "x-llm-d-inference-fairness-id", "x-smg-priority", "x-session-id",
            "authorization",
        ]
    ),
    TEXTS,
)  # fmt: skip
BODIES = st.dictionaries(
    st.sampled_from(["extra_args", "service_tier", "priority", "nvext", "prompt_cache_key"]),
    JSON
    | st.fixed_dictionaries({"ttft_target": JSON, "itl_target": JSON})
    | st.fixed_dictionaries({"agent_hints": JSON | st.fixed_dictionaries({"priority": JSON})}),
)


@settings(max_examples=300, deadline=None)
@given(HEADERS, BODIES)
def test_reading_never_fails_and_stays_in_bounds(headers, body):
    reading = read_slo(headers, body, Classes())
    for value in (reading.slo.ttft_ms, reading.slo.tpot_ms):
        assert value is None or MIN_MS <= value <= MAX_MS
    assert -MAX_PRIORITY <= reading.priority <= MAX_PRIORITY
    assert reading.tenant.isascii()
    assert 0 < len(reading.tenant) <= 128
    assert len(reading.session) <= 64
    assert reading == read_slo(headers, body, Classes())


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("team-a", "team-a"),
        (" a/b:c ", "a/b:c"),
        ("", None),
        ("a b", None),
        ("é", None),
        ("a\n", None),
        ("x" * 129, None),
    ],
)
def test_names(text, cleaned):
    assert clean(text) == cleaned


def test_a_huge_number_of_digits_is_not_slow():
    assert parse_ms("1" * min(200_000, sys.maxsize)) == MAX_MS
