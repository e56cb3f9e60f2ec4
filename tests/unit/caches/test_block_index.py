"""The index of a prefix cache against a model of one: what it says is held is held, and nothing else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api.cache import BlocksRemoved, BlocksStored, CacheEvent, CacheReset
from pdhub.core.blocks import BlockIndex, chain
from pdhub.core.marks import Marks

SIZE = 4
prompts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=8)


def names(ids: list[int]) -> list[tuple[int, ...]]:
    """A cache that names blocks by all tokens up to their end."""
    return [tuple(ids[: end + SIZE]) for end in range(0, len(ids) - SIZE + 1, SIZE)]


def stored(ids: list[int], start: int = 0) -> BlocksStored:
    mine = names(ids)
    tokens = tuple(ids[start * SIZE : len(mine) * SIZE])
    return BlocksStored(tuple(mine[start:]), mine[start - 1] if start else None, tokens, SIZE)


@settings(deadline=None, max_examples=60)
@given(prompts, st.data())
def test_it_says_what_the_cache_holds(told: list[list[int]], data: st.DataObject) -> None:
    index, model = BlockIndex(), set()
    index.apply([CacheReset(empty=True)])
    for ids in told:
        index.apply([stored(ids)])
        model |= set(names(ids))
        gone = data.draw(st.lists(st.sampled_from(sorted(model)), max_size=3)) if model else []
        index.apply([BlocksRemoved((name,)) for name in gone])
        model -= set(gone)
    for ids in told:
        expected = 0
        for name in names(ids):
            if name not in model:
                break
            expected += 1
        assert index.depth(chain(ids, SIZE)) == expected
    assert len(index) == len(model)
    assert index.complete


@settings(deadline=None, max_examples=40)
@given(prompts, st.integers(1, 5))
def test_its_memory_is_bounded_and_it_admits_what_it_forgot(told: list[list[int]], limit: int) -> None:
    index, seen = BlockIndex(limit), set()
    index.apply([CacheReset(empty=True)])
    for ids in told:
        index.apply([stored(ids)])
        seen |= set(names(ids))
        assert len(index) <= limit
    assert index.complete or len(seen) > limit


def test_blocks_after_unknown_ones_are_not_taken_for_a_beginning() -> None:
    index, ids = BlockIndex(), list(range(16))
    index.apply([stored(ids, start=1)])
    assert len(index) == 0
    assert index.depth(chain(ids[4:], SIZE)) == 0


def test_the_same_block_under_two_names_is_there_until_both_are_gone() -> None:
    index, ids = BlockIndex(), list(range(4))
    for name in ("a", "b"):
        index.apply([BlocksStored((name,), None, tuple(ids), SIZE)])
    index.apply([BlocksRemoved(("a",))])
    assert index.depth(chain(ids, SIZE)) == 1
    index.apply([BlocksRemoved(("b",)), BlocksRemoved(("b",))])
    assert index.depth(chain(ids, SIZE)) == 0


def test_a_reset_says_whether_what_follows_is_all() -> None:
    index = BlockIndex()
    events: list[CacheEvent] = [stored(list(range(8))), CacheReset(empty=False)]
    index.apply(events)
    assert (len(index), index.complete) == (0, False)
    index.apply([CacheReset(empty=True)])
    assert index.complete


def test_marks_lead_from_text_to_tokens_and_no_further_than_both_share() -> None:
    marks = Marks()
    shared, tail = list(range(1000, 1200)), list(range(2000, 2100))
    # Ten text blocks of 30 tokens each; the first six begin other prompts too.
    marks.learn(range(10), 1 / 10, [*shared, *tail], SIZE)
    found = marks.of(range(6), SIZE)
    assert len(found) == 6
    held = chain(shared, SIZE)
    assert set(found) <= set(held)  # 6 × 30 tokens end inside what is shared
    assert held.index(found[-1]) >= len(held) // 2
    assert marks.of([99], SIZE) == []
    assert marks.of(range(10), SIZE + 1) == []


def test_marks_are_bounded() -> None:
    marks = Marks(entries=5)
    for prompt in range(4):
        marks.learn(range(100 * prompt, 100 * prompt + 4), 1 / 4, list(range(64)), SIZE)
    assert len(marks) == 5
