"""What a rule's match means."""

from __future__ import annotations

from datetime import UTC, datetime, time
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import SLO, Feature, RequestView
from pdhub.policies.match import Match, Range, Window

REQUEST = RequestView(
    id="r",
    model="llama",
    endpoint="/v1/completions",
    prompt_tokens=100,
    max_tokens=50,
    features=frozenset({Feature.TOOLS, Feature.SEED}),
    slo=SLO(tpot_ms=10.0, slo_class="chat"),
    stream=True,
    tenant="team-a",
    priority=-2,
    headers={"x-beta": "yes"},
    wall_s=datetime(2026, 3, 2, 23, 30, tzinfo=UTC).timestamp(),  # a Monday
)


@pytest.mark.parametrize(
    ("match", "holds"),
    [
        (Match(), True),
        (Match(models=("ll*",)), True),
        (Match(models=("gpt", "llam?")), True),
        (Match(models=("gpt",)), False),
        (Match(endpoints=("/v1/chat/*",)), False),
        (Match(tenants=("team-*",)), True),
        (Match(slo_classes=("chat",)), True),
        (Match(slo_classes=("batch",)), False),
        (Match(headers={"x-beta": "*"}), True),
        (Match(headers={"x-beta": "y?s", "x-other": "*"}), False),
        (Match(headers={"x-beta": "YES"}), False),
        (Match(stream=True), True),
        (Match(stream=False), False),
        (Match(has_slo=True), True),
        (Match(has_slo=False), False),
        (Match(tpot_ms=Range(10, 20)), True),
        (Match(tpot_ms=Range(5, 10)), False),
        (Match(ttft_ms=Range(0, None)), False),
        (Match(prompt_tokens=Range(None, 101)), True),
        (Match(max_tokens=Range(51, None)), False),
        (Match(priority=Range(None, 0)), True),
        (Match(features=frozenset({Feature.TOOLS})), True),
        (Match(features=frozenset({Feature.TOOLS, Feature.N})), False),
        (Match(without=frozenset({Feature.SEED})), False),
        (Match(models=("llama",), stream=False), False),
    ],
)
def test_everything_that_is_given_must_hold(match, holds):
    assert match.holds(REQUEST) is holds


def test_no_cap_on_the_answer_is_in_no_range():
    assert not Match(max_tokens=Range(0, None)).holds(RequestView("r", "m", "/", 1))


NIGHT = Window(frozenset({0}), time(22), time(6))
ALWAYS = Window(frozenset(range(7)), time(0), time(0))


@pytest.mark.parametrize(
    ("moment", "inside"),
    [
        ("2026-03-02T21:59", False), ("2026-03-02T22:00", True), ("2026-03-03T05:59", True),
        ("2026-03-03T06:00", False), ("2026-03-02T05:00", False),  # the night of Sunday
        ("2026-03-03T23:00", False),
    ],
)  # fmt: skip
def test_a_window_over_midnight_belongs_to_the_day_it_starts_on(moment, inside):
    assert NIGHT.holds(datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp()) is inside


def test_a_window_has_a_zone():
    berlin = Window(frozenset(range(7)), time(9), time(17), ZoneInfo("Europe/Berlin"))
    assert berlin.holds(datetime(2026, 7, 1, 7, 30, tzinfo=UTC).timestamp())
    assert not berlin.holds(datetime(2026, 1, 1, 7, 30, tzinfo=UTC).timestamp())


def test_an_unknown_time_is_in_no_window():
    assert Match(windows=(NIGHT,)).holds(REQUEST)
    assert not Match(windows=(ALWAYS,)).holds(RequestView("r", "m", "/", 1))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4_000_000_000), st.times(), st.times())
def test_a_window_and_the_rest_of_the_day_are_all_of_it(wall_s, start, end):
    days = frozenset(range(7))
    if start != end:
        assert Window(days, start, end).holds(wall_s) is not Window(days, end, start).holds(wall_s)
    assert ALWAYS.holds(wall_s)
