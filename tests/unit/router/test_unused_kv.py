"""When is it certain that nobody uses the KV that a decode node holds?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api.engine import EngineLoad
from pdhub.router.unused import WORTH_WAITING_S, Unused

AFTER_S = 5.0


def idle(kv):
    return EngineLoad(running=0, waiting=0, kv_usage=kv)


def seen(unused, loads, at=0.0):
    """One probe a second."""
    for second, load in enumerate(loads):
        unused.seen(load, False, at + second)


def test_kv_that_stays_while_nothing_happens_is_stranded_after_a_while():
    unused = Unused(AFTER_S)
    seen(unused, [idle(0.1)] * 5)
    assert unused.quiet
    assert unused.stranded_s(4.9) is None
    assert unused.stranded_s(7.0) == 2.0
    assert unused.usage == 0.1


@pytest.mark.parametrize(
    ("load", "busy"),
    [
        (idle(0.1), True),
        (EngineLoad(running=1, waiting=0, kv_usage=0.1), False),
        (EngineLoad(running=0, waiting=1, kv_usage=0.1), False),
        (idle(0.0), False),
        (EngineLoad(running=None, waiting=0, kv_usage=0.1), False),
        (EngineLoad(running=0, waiting=None, kv_usage=0.1), False),
        (EngineLoad(running=0, waiting=0, kv_usage=None), False),
    ],
)
def test_any_sign_of_work_or_anything_unknown_starts_the_time_anew(load, busy):
    unused = Unused(AFTER_S)
    seen(unused, [idle(0.1)] * 5)
    unused.seen(load, busy, 5.0)
    assert not unused.quiet
    assert unused.stranded_s(100.0) is None
    unused.seen(idle(0.1), False, 6.0)
    assert unused.stranded_s(10.9) is None
    assert unused.stranded_s(11.0) == 0.0


def test_a_change_of_what_is_held_is_somebody_at_work():
    unused = Unused(AFTER_S)
    seen(unused, [idle(0.1)] * 5)
    unused.seen(idle(0.05), False, 5.0)
    assert unused.quiet
    assert unused.stranded_s(9.9) is None
    assert unused.stranded_s(10.0) == 0.0


def test_an_engine_that_lets_go_soon_is_waited_for_unless_its_prefill_instance_is_lost():
    """As with Mooncake: 45 s, or 105 s, which is too long."""
    unused = Unused(AFTER_S, lets_go_s=45.0, lets_go_lost_s=105.0)
    seen(unused, [idle(0.1)])
    assert unused.stranded_s(49.0) is None
    assert unused.stranded_s(50.0) == 0.0
    unused.lost()
    assert unused.stranded_s(5.0) == 0.0
    seen(unused, [idle(0.0), idle(0.1)], at=60.0)  # it held nothing: what was lost is forgotten
    assert unused.stranded_s(61.0 + 49.0) is None


def test_the_process_that_is_gone_takes_its_kv_with_it():
    unused = Unused(AFTER_S)
    seen(unused, [idle(0.1)] * 9)
    unused.void()
    assert (unused.quiet, unused.usage, unused.stranded_s(100.0)) == (False, 0.0, None)


_LOADS = st.builds(
    EngineLoad,
    running=st.sampled_from([0, 0, 0, 1, None]),
    waiting=st.sampled_from([0, 0, 0, 2, None]),
    kv_usage=st.sampled_from([0.2, 0.2, 0.2, 0.3, 0.0, None]),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(_LOADS, st.sampled_from([False, False, False, True]), st.floats(0.1, 4.0)), max_size=40),
    st.sampled_from([0.0, 3.0, WORTH_WAITING_S + 1]),
)
def test_stranded_means_the_same_word_from_an_idle_engine_for_all_of_the_time(probes, lets_go_s):
    unused, now, history = Unused(AFTER_S, lets_go_s, lets_go_s), 0.0, []
    patience_s = AFTER_S + (lets_go_s if lets_go_s <= WORTH_WAITING_S else 0.0)
    for load, busy, pause in probes:
        now += pause
        unused.seen(load, busy, now)
        history.append((now, load, busy))
        same_since = None
        for at, told, work in reversed(history):
            if work or told != idle(load.kv_usage) or not told.kv_usage:
                break
            same_since = at
        expected = same_since is not None and now - same_since >= patience_s
        assert (unused.stranded_s(now) is not None) == expected
