"""Stop strings against a search of the whole text."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.router.presentation.stop import StopMatcher


def run(stops, pieces, include=False, armed_from=0):
    matcher = StopMatcher(stops, include=include)
    shown = []
    for n, piece in enumerate(pieces):
        shown.append(matcher.feed(piece, armed=n >= armed_from))
        if matcher.matched:
            return shown, matcher.matched
    return [*shown, matcher.flush()], None


def expected(stops, text, include=False, armed_from=0):
    """The first place where a stop string is complete; of several the one named first."""
    for end in range(armed_from + 1, len(text) + 1):
        for stop in stops:
            if end >= len(stop) and text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["STOP"], ["abST", "OPcd"], ["ab", ""], "STOP"),
        (["STOP"], ["abST", "ab"], ["ab", "STab", ""], None),
        (["STOP"], ["ab", "ST"], ["ab", "", "ST"], None),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
        (["aab"], ["aaaa", "ab"], ["aa", "a"], "aab"),
        (["abc", "b"], ["a", "bc"], ["", "a"], "b"),
        (["b", "a"], ["xab"], ["x"], "a"),
        (["bc", "abc"], ["abc"], ["a"], "bc"),
        (["abc", "bc"], ["abc"], [""], "abc"),
        (["é😀"], ["né", "😀"], ["n", ""], "é😀"),
    ],
)
def test_what_is_shown_and_when(stops, pieces, shown, matched):
    assert run(stops, pieces) == (shown, matched)


def test_including_the_stop_string_holds_nothing_back():
    assert run(["STOP"], ["abST", "OPcd"], include=True) == (["abST", "OP"], "STOP")


def test_a_match_before_it_counts_is_text():
    assert run(["ab"], ["ab", "ab"], armed_from=1) == (["ab", ""], "ab")
    assert run(["abc", "b"], ["ab", "d"], armed_from=1) == (["", "abd", ""], None)
    assert run(["ab"], ["a", "b"], armed_from=1) == (["", ""], "ab"), "it counts where it ends"


_text = st.text("ab\n", max_size=30)


@settings(deadline=None, max_examples=120)
@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=3),
    text=_text,
    cuts=st.lists(st.integers(0, 30)),
    include=st.booleans(),
)
def test_the_cutting_of_the_text_changes_nothing(stops, text, cuts, include):
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    shown, matched = run(stops, pieces, include)
    assert ("".join(shown), matched) == expected(stops, text, include)


@settings(deadline=None, max_examples=100)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    text=_text,
    armed_from=st.integers(0, 8),
    include=st.booleans(),
)
def test_matches_count_from_where_they_may(stops, text, armed_from, include):
    shown, matched = run(stops, list(text), include, armed_from)
    assert ("".join(shown), matched) == expected(stops, text, include, armed_from)


@settings(deadline=None, max_examples=100)
@given(stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), text=_text)
def test_no_more_is_held_back_than_may_become_a_stop_string(stops, text):
    matcher = StopMatcher(stops)
    shown = seen = ""
    for character in text:
        shown += matcher.feed(character)
        seen += character
        if matcher.matched:
            break
        held = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert shown == seen[: len(seen) - held]


def test_a_long_repetitive_stop_string_is_no_burden():
    matcher = StopMatcher(["a" * 20_000 + "b"])
    shown = "".join(matcher.feed("a" * 50) for _ in range(1_000)) + matcher.flush()
    assert shown == "a" * 50_000
