"""Where a request waits: the policy's order, left only for a target that would be lost."""

from hypothesis import given
from hypothesis import strategies as st

from pdhub.api.request import SLO
from pdhub.core.spill import Door, Way, choose_door

TARGETS = SLO(ttft_ms=1000, tpot_ms=10)

doors = st.lists(
    st.builds(
        Door,
        pool=st.sampled_from("abcdef"),
        opens=st.booleans(),
        ttft_ms=st.none() | st.floats(0, 3000),
        tpot_ms=st.none() | st.floats(0, 30),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda door: door.pool,
)


def way(*those, left=1000.0, held=None):
    return choose_door(those, TARGETS, left, held)


def test_the_policys_first_pool_while_it_is_in_time_or_unknown():
    later = Door("b", ttft_ms=1.0, tpot_ms=1.0)
    assert way(Door("a", ttft_ms=999, tpot_ms=9), later) == Way("a", True)
    assert way(Door("a"), later) == Way("a", True)
    assert way(Door("a", ttft_ms=999, tpot_ms=99), later) == Way("a", True), "tokens were the policy's to weigh"


def test_the_next_before_the_target_is_lost():
    assert way(Door("a", ttft_ms=1001), Door("b", ttft_ms=1000)) == Way("b", True)
    assert way(Door("a", ttft_ms=600), Door("b", ttft_ms=400), left=500) == Way("b", True)
    assert way(Door("a", opens=False), Door("b", ttft_ms=10)) == Way("b", True)


def test_late_tokens_are_better_than_none():
    slow, slower = Door("b", ttft_ms=10, tpot_ms=20), Door("c", ttft_ms=10, tpot_ms=40)
    assert way(Door("a", ttft_ms=1001, tpot_ms=1), slow, slower) == Way("b", True)
    assert way(Door("a", ttft_ms=1001, tpot_ms=1), slow, Door("c", ttft_ms=900, tpot_ms=9)) == Way("c", True)


def test_if_all_are_late_the_first_that_opens_and_it_is_said_so():
    assert way(Door("a", ttft_ms=1500), Door("b", ttft_ms=1200)) == Way("a", False)
    assert way(Door("a", opens=False), Door("b", ttft_ms=1200)) == Way("b", False)
    assert way(Door("a", opens=False), Door("b", opens=False)) == Way("a", False)


def test_whoever_has_a_place_keeps_it_while_that_serves():
    first, second = Door("a", ttft_ms=10), Door("b", ttft_ms=500)
    assert way(first, second, held="b") == Way("b", True)
    assert way(first, Door("b", ttft_ms=1500), held="b") == Way("a", True)


@given(doors=doors, left=st.floats(0, 2000))
def test_never_a_worse_door_than_another_that_is_offered(doors, left):
    chosen = choose_door(doors, TARGETS, left)
    door = next(d for d in doors if d.pool == chosen.pool)

    def late(d):
        return not d.opens or (d.ttft_ms is not None and d.ttft_ms > left)

    assert chosen.in_time == (not late(door))
    assert chosen.in_time or all(late(d) for d in doors)
    assert door.opens or not any(d.opens for d in doors)
    assert door is doors[0] or late(doors[0])
