"""Restart delays: they double to a cap, jitter only adds, and a stable child starts over."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.operate.backoff import Backoff, RestartRule


def delays(rule: RestartRule, lives: list[float | None]) -> list[float | None]:
    backoff = Backoff(rule, random.Random(1))
    return [backoff.died(life) for life in lives]


def test_delays_double_to_the_cap_and_then_it_gives_up() -> None:
    rule = RestartRule(first_s=1, cap_s=5, jitter=0, give_up_after=5)
    assert delays(rule, [None] * 6) == [1, 2, 4, 5, 5, None]


def test_a_stable_life_starts_over() -> None:
    rule = RestartRule(first_s=1, cap_s=100, jitter=0, stable_s=60, give_up_after=3)
    assert delays(rule, [None, 59.9, 60.0, None]) == [1, 2, 1, 2]


def test_a_child_that_never_was_stable_is_given_up() -> None:
    rule = RestartRule(jitter=0, stable_s=60, give_up_after=1)
    assert delays(rule, [59.0, 59.0]) == [rule.first_s, None]


@given(st.integers(0, 2**32), st.integers(1, 2_000))
@settings(max_examples=30, deadline=None)
def test_every_delay_is_within_the_cap_and_its_jitter(seed: int, failures: int) -> None:
    rule = RestartRule(give_up_after=10_000)
    backoff = Backoff(rule, random.Random(seed))
    for _ in range(failures):
        delay = backoff.died(None)
        assert delay is not None
        assert rule.first_s <= delay <= rule.cap_s * (1 + rule.jitter)


def test_jitter_spreads_equal_children() -> None:
    rule = RestartRule()
    assert Backoff(rule, random.Random(1)).died(None) != pytest.approx(Backoff(rule, random.Random(2)).died(None))
