"""The breaker opens, lets one trial in, and never stays open for ever."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdhub.router.breaker import Breaker, BreakerState, acquire_all


@pytest.fixture
def breaker():
    return Breaker(failures=2, open_s=2.0, trial_s=5.0)


def opened(breaker, at=0.0):
    breaker.failure(at)
    breaker.failure(at)
    return breaker


def test_failures_in_a_row_open_it(breaker):
    breaker.failure(0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    breaker.success()
    breaker.failure(1.0)
    assert breaker.state(1.0) is BreakerState.CLOSED
    breaker.failure(1.0)
    assert breaker.state(1.0) is BreakerState.OPEN
    assert not breaker.acquire(2.9)


def test_a_clients_mistake_neither_fails_nor_heals(breaker):
    breaker.failure(0.0)
    for _ in range(10):
        breaker.neutral()
    assert breaker.state(0.0) is BreakerState.CLOSED
    breaker.failure(0.0)
    assert breaker.state(0.0) is BreakerState.OPEN


def test_half_open_lets_exactly_one_in(breaker):
    opened(breaker)
    assert breaker.state(2.0) is BreakerState.HALF_OPEN
    assert breaker.acquire(2.0)
    assert not breaker.acquire(2.0)
    assert breaker.state(2.0) is BreakerState.OPEN
    breaker.success()
    assert breaker.state(2.0) is BreakerState.CLOSED


def test_a_trial_that_never_reports_has_a_deadline(breaker):
    opened(breaker)
    assert breaker.acquire(2.0)
    assert not breaker.acquire(6.9)
    assert breaker.acquire(7.0)


def test_a_failed_trial_opens_it_anew_at_once(breaker):
    opened(breaker)
    assert breaker.acquire(3.0)
    breaker.failure(4.0)
    assert not breaker.acquire(5.9)
    assert breaker.acquire(6.0)


def test_a_neutral_trial_leaves_room_for_the_next(breaker):
    opened(breaker)
    assert breaker.acquire(2.0)
    breaker.neutral()
    assert breaker.acquire(2.0)


def test_next_change_tells_when_to_look_again(breaker):
    assert breaker.next_change(0.0) is None
    opened(breaker)
    assert breaker.next_change(0.0) == 2.0
    assert breaker.acquire(2.0)
    assert breaker.next_change(2.0) == 7.0


def test_all_or_none(breaker):
    opened(breaker)
    closed, other = Breaker(1, 1, 1), opened(Breaker(2, 100.0, 1.0))
    assert not acquire_all([breaker, closed, other], 3.0)
    assert breaker.state(3.0) is BreakerState.HALF_OPEN, "the trial was given back"
    assert acquire_all([breaker, closed], 3.0)


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens, an endpoint that stays well gets traffic again within a bound."""

    def __init__(self):
        super().__init__()
        self.breaker = Breaker(failures=3, open_s=2.0, trial_s=5.0)
        self.now = 0.0

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def fail(self):
        self.breaker.failure(self.now)

    @rule()
    def succeed(self):
        self.breaker.success()

    @rule()
    def refuse(self):
        self.breaker.neutral()

    @rule()
    def take(self):
        self.breaker.acquire(self.now)

    @invariant()
    def is_never_shut_for_ever(self):
        later = self.now + 2.0 + 5.0 + 1e-6
        assert self.breaker.state(later) is not BreakerState.OPEN
        state, change = self.breaker.state(self.now), self.breaker.next_change(self.now)
        if state is BreakerState.OPEN:
            assert change is not None
            assert change > self.now


TestAnyOrder = AnyOrder.TestCase
