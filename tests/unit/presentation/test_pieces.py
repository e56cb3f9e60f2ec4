"""Text cut where tokens end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import Piece
from pdhub.router.presentation.pieces import Pieces


def test_a_token_waits_for_its_text():
    cut = Pieces()
    cut.token(1, 2)
    cut.token(2, 2)  # a part of a character
    cut.token(3, 6)
    assert cut.cut("ab", ended=False) == [Piece("ab", (1,)), Piece("", (2,))]
    assert cut.cut("cd", ended=False) == []
    assert cut.cut("ef", ended=False) == [Piece("cdef", (3,))]
    cut.token(4, 9)
    assert cut.cut("", ended=True) == [Piece("", (4,))], "its text was cut away"


def test_text_of_no_token_comes_last():
    cut = Pieces()
    cut.token(1, 1)
    assert cut.cut("a\ufffd", ended=True) == [Piece("a", (1,)), Piece("\ufffd")]


@settings(deadline=None, max_examples=100)
@given(sizes=st.lists(st.integers(0, 3), min_size=1, max_size=12), held=st.lists(st.integers(0, 5)), data=st.data())
def test_how_it_is_shown_changes_nothing(sizes, held, data):
    """A token comes before its text is shown, or with it; the text comes in any portions that lag behind."""
    text = "abcdefghijklmnopqrstuvwxyzabcdefghijk"[: sum(sizes)]
    end = data.draw(st.integers(0, len(text)))  # a stop string may cut the rest

    def run(lags):
        cut, out, shown, whole = Pieces(), [], 0, 0
        for token, size in enumerate(sizes):
            whole += size
            cut.token(token, whole)
            upto = max(shown, min(end, whole - lags[token % len(lags)]) if lags else 0)
            out += cut.cut(text[shown:upto], ended=False)
            shown = upto
        return out + cut.cut(text[shown:end], ended=True)

    told, late = run(held), run([])
    assert "".join(p.text for p in told) == text[:end]
    assert [i for p in told for i in p.token_ids] == list(range(len(sizes)))
    assert told == late
