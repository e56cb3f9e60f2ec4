"""Simulated engines against what can be computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.simulate.cost import Curve, DecodeCost, PrefillCost
from pdhub.simulate.engine import Node, Prefill
from pdhub.simulate.loop import Loop
from pdhub.simulate.truth import Event, Factor, Truth, factor
from pdhub.simulate.workload import Arrival, Class

STEADY = Factor(1.0, 0.0, 1.0, 0.0, ())


def request(number: int = 0, *, prompt: int = 100, output: int = 11, prefix: tuple[int, ...] = ()) -> Arrival:
    return Arrival(number, 0.0, prompt, output, prefix, Class("c"), 0.0, prompt, "t")


def run(cost: DecodeCost, plan: list[tuple[float, int]], speed: Factor = STEADY) -> list[tuple[float, float]]:
    """(first, done) of requests that become ready at these times, with so many tokens."""
    loop = Loop()
    node = Node(loop, "n", cost, speed)
    times = [[-1.0, -1.0] for _ in plan]

    def ready(index: int) -> None:
        def first() -> None:
            times[index][0] = loop.now

        def done() -> None:
            times[index][1] = loop.now

        node.ready(request(index, output=plan[index][1]), first, done)

    for i, (at, _) in enumerate(plan):
        loop.at(at, ready, i)
    loop.run()
    assert not node.running
    assert not node.waiting
    return [(first, done) for first, done in times]


def test_one_request_takes_its_tokens_times_their_time() -> None:
    assert run(DecodeCost(tpot_ms={1: 10}), [(1.0, 11)]) == [(1.0, pytest.approx(1.1))]


def test_a_single_token_is_done_at_once() -> None:
    assert run(DecodeCost(tpot_ms={1: 10}), [(1.0, 1)]) == [(1.0, 1.0)]


def test_one_slot_serves_one_after_the_other() -> None:
    times = run(DecodeCost(slots=1, tpot_ms={1: 10}), [(0.0, 11), (0.0, 11), (0.05, 11)])
    assert times == [(0.0, pytest.approx(0.1)), (pytest.approx(0.1), pytest.approx(0.2)),
                     (pytest.approx(0.2), pytest.approx(0.3))]  # fmt: skip


def test_requests_that_share_a_step_slow_each_other() -> None:
    cost = DecodeCost(slots=2, tpot_ms={1: 10, 2: 20})
    # Alone for 50 ms: 5 tokens. Then together: 5 more at 20 ms each. The second has 5 left, alone again.
    first, second = run(cost, [(0.0, 11), (0.05, 11)])
    assert first == (0.0, pytest.approx(0.05 + 0.1))
    assert second == (0.05, pytest.approx(0.15 + 0.05))


def test_context_makes_tokens_slower() -> None:
    cost = DecodeCost(slots=1, tpot_ms={1: 10}, context={0: 1.0, 1000: 3.0})
    loop = Loop()
    node = Node(loop, "n", cost, STEADY)
    node.ready(request(prompt=495, output=11), lambda: None, lambda: None)
    loop.run()
    assert loop.now == pytest.approx(10 * 0.01 * (1 + 2 * 0.5005), rel=1e-3)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 40)), min_size=1, max_size=12), st.integers(1, 4))
def test_nobody_is_lost_and_nobody_is_faster_than_alone(plan: list[tuple[float, int]], slots: int) -> None:
    cost = DecodeCost(slots=slots, tpot_ms={1: 10, 4: 25})
    for (at, tokens), (first, done) in zip(plan, run(cost, plan), strict=True):
        assert first >= at - 1e-9
        assert done - first >= (tokens - 1) * 0.01 - 1e-6
        assert done - first <= (tokens - 1) * 0.025 + 1e-6


def test_speed_that_changes_counts_from_then_on() -> None:
    slow = Factor(1.0, 0.0, 1.0, 0.0, [Event("n", 1.0, 100.0, 2.0)])
    ((_, done),) = run(DecodeCost(tpot_ms={1: 10}), [(0.0, 301)], slow)
    # 1 s: 100 tokens; the other 200 take twice as long, but for what is noticed late.
    assert 4.4 <= done <= 5.0


def test_prefill_is_first_come_first_served_and_knows_prefixes() -> None:
    loop = Loop()
    engine = Prefill(loop, "p", PrefillCost(ms=10, ms_per_token=0.1, cache_tokens=10_000), STEADY)
    seen: list[tuple[float, int]] = []
    for number, prefix in enumerate([(1, 2), (1, 3), (4,)]):
        engine.submit(request(number, prompt=1024, prefix=prefix), lambda cached: seen.append((loop.now, cached)))
    loop.run()
    assert [cached for _, cached in seen] == [0, 512, 0]
    times = [at for at, _ in seen]
    assert times == [pytest.approx(0.1124), pytest.approx(0.1124 + 0.0612), pytest.approx(0.1124 * 2 + 0.0612)]


def test_the_cache_forgets_the_longest_unused() -> None:
    loop = Loop()
    engine = Prefill(loop, "p", PrefillCost(cache_tokens=1024), STEADY)
    seen: list[int] = []
    for prefix in [(1, 2), (3, 4), (1, 2)]:
        engine.submit(request(prompt=1024, prefix=prefix), seen.append)
    loop.run()
    assert seen == [0, 0, 0]


def test_curves_go_on_with_their_last_slope() -> None:
    curve = Curve({1: 10.0, 4: 16.0, 8: 20.0})
    assert [curve.at(x) for x in (0, 1, 2.5, 4, 6, 8, 12)] == [10, 10, 13, 16, 18, 20, 24]


def test_truth_is_the_same_for_all_policies_and_within_its_bounds() -> None:
    truth = Truth(spread=0.5, nodes=0.1, drift=0.2)
    for seed in range(50):
        values = [factor(truth, "fast", "fast-0", seed).at(t) for t in range(0, 240, 10)]
        assert values == [factor(truth, "fast", "fast-0", seed).at(t) for t in range(0, 240, 10)]
        assert all(1 / (1.5 * 1.1) * 0.8 - 1e-9 <= v <= 1.5 * 1.1 * 1.2 + 1e-9 for v in values)
    assert factor(Truth(), "fast", "fast-0", 1).at(5.0) == 1.0
