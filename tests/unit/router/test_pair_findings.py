"""Which pairs may be used, as self-checks come and go."""

from __future__ import annotations

from pdhub.router.pairs import Pairs, Verdict

PAIR = ("p", "d")


def test_a_pair_that_nobody_looked_at_may_be_used() -> None:
    pairs = Pairs()
    assert not pairs.held(*PAIR)
    assert pairs.of(*PAIR).verdict is Verdict.UNKNOWN
    assert list(pairs.problems()) == []
    assert dict(pairs.found) == {}


def test_it_waits_for_its_check() -> None:
    pairs = Pairs()
    pairs.due(PAIR)
    assert pairs.held(*PAIR)
    assert list(pairs.problems()) == ["p → d: its self-check has not ended yet"]
    pairs.good(PAIR)
    assert not pairs.held(*PAIR)
    assert list(pairs.problems()) == []


def test_a_bad_pair_stays_out_and_says_why_until_a_check_passes() -> None:
    pairs = Pairs()
    pairs.bad(PAIR, "wrong")
    pairs.due(PAIR)
    assert pairs.held(*PAIR)
    assert list(pairs.problems()) == ["p → d: wrong"]
    pairs.good(PAIR)
    assert not pairs.held(*PAIR)


def test_what_cannot_be_decided_does_not_stop_anybody() -> None:
    pairs = Pairs()
    pairs.due(PAIR)
    pairs.unknown(PAIR, "no reference")
    assert not pairs.held(*PAIR)
    assert list(pairs.problems()) == []
    assert pairs.of(*PAIR).why == "no reference"
