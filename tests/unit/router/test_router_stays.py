"""Stays on nodes, and the picture that policies see of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest

from pdhub.api.client import LegOrder
from pdhub.api.engine import Capabilities, EngineLoad
from pdhub.api.policy import Health, NodeView, PoolView, Prediction
from pdhub.api.request import SLO, RequestView
from pdhub.core.latency import PREFILL, LatencyModel, PoolSeed, Tuning
from pdhub.policies.slo import Slo, SloConfig
from pdhub.router.breaker import Breaker
from pdhub.router.endpoint import Endpoint
from pdhub.router.fleet import Fleet, Pool
from pdhub.router.flight import Flight
from pdhub.router.rulebook import Rulebook
from pdhub.router.stay import Stay

SEED = PoolSeed(ttft_ms=100, tpot_ms=10, output_tokens=50)


def endpoint(name: str, *, hosted: bool = True) -> Endpoint:
    made = Endpoint(name, "http://there", breaker=Breaker(2, 2.0, 5.0), probe_failures=3, hosted=hosted)
    made.answered({"there": True}, 0.0)
    made.slots = 2
    return made


class World:
    """Pools ``fast`` and ``slow`` of two nodes each, one prefill instance."""

    def __init__(self, *, hosted: bool = True) -> None:
        client = SimpleNamespace(order=LegOrder.PREFILL_FIRST, capabilities=lambda info: Capabilities(slots=2))
        pools = [
            Pool(name, client, {n: endpoint(n, hosted=hosted) for n in (f"{name}-0", f"{name}-1")}, frozenset({"m"}))  # type: ignore[arg-type]
            for name in ("fast", "slow")
        ]
        self.waiting: dict[str, int] = {"fast": 0, "slow": 0}
        self.model = LatencyModel({"fast": SEED, "slow": SEED}, Tuning(refresh_s=0.0))
        self.fleet = Fleet(
            pools,
            [endpoint("prefill")],
            pair_open_s=2.0,
            latency=self.model,
            load_stale_s=4.0,
            waiting=lambda: dict(self.waiting),
        )
        self.node = self.fleet.pools["fast"].nodes["fast-0"]
        self.prefill = self.fleet.prefills["prefill"]
        self._count = 0

    def stay(self, now: float = 0.0, **request: object) -> tuple[Flight, Stay]:
        self._count += 1
        flight = Flight(f"r{self._count}", now, cast(Rulebook, None))
        members: dict[str, object] = {"prompt_tokens": 400, "stream": True, **request}
        view = RequestView(flight.id, "m", "/v1/completions", **members)  # type: ignore[arg-type]
        predicted = self.fleet.predict(view, "fast", self.node.name, now)
        flight.pool, flight.node = "fast", self.node.name
        return flight, Stay(self.fleet, flight, view, "fast", self.node, self.prefill, predicted, now)

    def view(self, now: float, name: str = "fast-0", inside: str | None = None) -> NodeView:
        pools = self.fleet.snapshot(now, inside).pools
        return next(node for pool in pools for node in pool.nodes if node.name == name)

    def seen(self, now: float, prompt: int = 400) -> Prediction:
        return self.fleet.predict(RequestView("r", "m", "/", prompt), "fast", "fast-0", now)

    def tpot(self, now: float) -> float | None:
        """Of one that runs alone."""
        pool = self.fleet.snapshot(now).pools[0]
        idle = NodeView("fast-0", "fast", slots=2)
        return self.model.freeze(now).predict(RequestView("r", "m", "/", 400), pool, idle, now).tpot_ms


def stream(flight: Flight, start: float, gap_s: float, count: int) -> float:
    for n in range(count):
        flight.tokens(1, start + n * gap_s)
    return start + (count - 1) * gap_s


def test_a_stay_shows_while_it_lasts() -> None:
    world = World()
    flight, stay = world.stay(max_tokens=30, slo=SLO(tpot_ms=25.0))
    seen = world.view(0.0)
    assert (seen.in_flight, seen.slots, seen.pending_tokens) == (1, 2, 400)
    assert (seen.remaining_tokens, seen.tightest_tpot_ms) == (30, 25.0)
    assert world.prefill.pending_tokens == 400
    stay.prefilled(0.0, 400, None, 0.1)
    assert (world.prefill.pending_tokens, world.view(0.1).pending_tokens) == (0, 400)
    flight.tokens(4, 0.2)
    seen = world.view(0.2)
    assert (seen.pending_tokens, seen.remaining_tokens) == (0, 26)
    stay.end(True, 0.3)
    assert world.view(0.3) == NodeView("fast-0", "fast", slots=2, remaining_tokens=0)


def test_an_answer_without_a_limit_is_as_long_as_they_are() -> None:
    world = World()
    world.stay()
    assert world.view(0.0).remaining_tokens == 50


def test_whatever_happens_nothing_stays_behind() -> None:
    world = World()
    _, first = world.stay()
    _, second = world.stay()
    first.end(False, 1.0)
    second.prefilled(0.0, 400, 100, 1.0)
    second.end(False, 2.0)
    assert (world.node.in_flight, world.node.pending_tokens, world.prefill.pending_tokens) == (0, 0, 0)
    assert world.node.stays == {}
    assert world.model.freeze(99.0).nodes["fast", "fast-0"].due_s == float("inf")


def test_the_prefill_leg_is_learned_for_its_instance() -> None:
    world = World()
    for n in range(10):
        _, stay = world.stay(float(n))
        stay.prefilled(float(n), 400, None, n + 0.25)
        stay.end(False, n + 0.3)
    instances = NodeView("prefill", "prefill")
    pool = PoolView("prefill", frozenset({"m"}), Capabilities(), (instances,), role="prefill")
    seen = world.model.freeze(10.0).predict(RequestView("r", "m", "/", 400), pool, instances, 10.0)
    assert seen.ttft_ms == pytest.approx(250, rel=0.05)


def test_ttft_is_learned_at_the_first_token_without_the_wait_for_a_slot() -> None:
    world = World()
    for n in range(8):
        flight, stay = world.stay(float(n))
        flight.stats = {"wait_ms": 300.0}
        flight.tokens(1, n + 0.8)
        stay.end(False, n + 0.9)
    assert world.seen(8.0).ttft_ms == pytest.approx(500, rel=0.1)


def test_a_wait_that_nobody_measured_is_not_taken_for_prefill() -> None:
    world = World()
    others = [world.stay()[1] for _ in range(2)]
    flight, stay = world.stay()
    flight.tokens(1, 60.0)
    assert world.model.freeze(60.0).pools["fast"].ttft.learned == (100.0, 0.0, 0.0)
    for each in (*others, stay):
        each.end(False, 61.0)


def test_tpot_is_learned_while_tokens_come() -> None:
    world = World()
    flight, stay = world.stay()
    now = stream(flight, 0.1, 0.05, 80)
    assert world.tpot(now) == pytest.approx(50, rel=0.1), "50 ms where the seed says 10"
    stay.end(True, now)


def test_tpot_counts_from_the_first_piece() -> None:
    world = World()
    flight, stay = world.stay()
    for n in range(40):
        flight.tokens(4, 0.1 + 0.2 * n)
    now = 0.1 + 0.2 * 39
    assert world.tpot(now) == pytest.approx(50, rel=0.25), "4 tokens in 200 ms"
    stay.end(True, now)


def test_one_slow_segment_is_not_believed_but_several_are() -> None:
    world = World()
    flight, stay = world.stay()
    now = stream(flight, 0.1, 0.01, 300)
    now = stream(flight, now + 0.01, 0.15, 4)
    assert world.tpot(now) == pytest.approx(10, rel=0.15)
    now = stream(flight, now + 0.15, 0.05, 60)
    assert world.tpot(now) == pytest.approx(50, rel=0.25)
    stay.end(True, now)


def test_an_answer_in_one_piece_teaches_tpot_at_its_end() -> None:
    world = World(hosted=False)
    for n in range(8):
        flight, stay = world.stay(10.0 * n, stream=False)
        flight.completion_tokens = 100
        stay.end(True, 10.0 * n + 0.1 + 100 * 0.03)
    assert world.tpot(73.1) == pytest.approx(30, rel=0.15)


def test_predictions_are_compared_with_what_came() -> None:
    world = World()
    flight, stay = world.stay()
    now = stream(flight, 0.2, 0.02, 40)
    stay.end(True, now)
    errors = world.model.errors()
    assert errors["fast", "ttft"].p50_error_ms == pytest.approx(100)
    assert errors["fast", "tpot"].p50_ratio == pytest.approx(2.0)
    record = flight.record("ok", None, now)
    assert (record.predicted_ttft_ms, record.predicted_tpot_ms, record.concurrency) == (100.0, 10.0, 1)


def test_a_node_that_fell_silent_is_seen_at_once() -> None:
    world = World()
    flight, stay = world.stay()
    ask = RequestView("r", "m", "/", 10)
    flight.tokens(1, 0.1)
    assert world.fleet.predict(ask, "fast", "fast-0", 0.4).tpot_ms == 10.0
    silent = world.fleet.predict(ask, "fast", "fast-0", 2.1)
    assert silent.tpot_ms == pytest.approx(2000)
    assert world.fleet.predict(ask, "fast", "fast-1", 2.1).tpot_ms == 10.0
    flight.tokens(1, 2.2)
    assert world.fleet.predict(ask, "fast", "fast-0", 2.3).tpot_ms == 10.0
    stay.end(True, 2.4)


@pytest.mark.parametrize(("before_ms", "late_s", "tpot_ms"), [(3900, 0.8, 10.0), (3100, 0.8, None), (3900, 6.0, None)])
def test_a_first_token_is_late_only_beyond_what_predictions_are_wrong_by(
    before_ms: float, late_s: float, tpot_ms: float | None
) -> None:
    """A node of one request at a time; 3 s are predicted, and earlier ones took so long: a tight request goes there."""
    world = World()
    world.model = world.fleet.latency = world.fleet._picture._latency = LatencyModel(
        {"fast": PoolSeed(ttft_ms=3000, tpot_ms=10), "slow": SEED}, Tuning(refresh_s=0.0)
    )
    for _ in range(20):
        world.model.compare("fast", "ttft", 3000.0, before_ms)
    world.stay()
    ask = RequestView("r", "m", "/", 10, slo=SLO(tpot_ms=12.0))
    at = 3.0 + late_s
    seen = world.fleet.predict(ask, "fast", "fast-0", at)
    assert (seen.tpot_ms == tpot_ms) if tpot_ms else ((seen.tpot_ms or 0) > 500)
    decision = Slo(SloConfig(explore=0)).choose(ask, world.fleet.snapshot(at), at, random.Random(0))
    order = [node for _, node in decision.order]
    assert (order.index("fast-0") < order.index("slow-0")) is (tpot_ms is not None)


def test_a_hand_over_after_a_slow_prefill_has_the_time_that_it_may_take() -> None:
    world = World()
    ask = RequestView("r", "m", "/", 10)
    for _ in range(20):
        world.model.compare("fast", "ttft", 100.0, 350.0)
    _, stay = world.stay()
    stay.prefilling(0.0)
    stay.prefilled(0.0, 400, None, 5.0)
    assert world.fleet.predict(ask, "fast", "fast-0", 5.7).tpot_ms == 10.0
    assert (world.fleet.predict(ask, "fast", "fast-0", 5.8).tpot_ms or 0) > 500


def test_how_wrong_predictions_are_is_forgotten_and_bounded() -> None:
    model = LatencyModel()
    assert model.latest_ms("p", 100.0) == 200.0, "nothing is known"
    for _ in range(300):
        model.compare("p", "ttft", 100.0, 10_000.0)
    assert model.latest_ms("p", 100.0) == 400.0, "an incident is not how predictions are"
    for _ in range(300):
        model.compare("p", "ttft", 100.0, 90.0)
    assert model.latest_ms("p", 100.0) == 100.0


def test_the_picture_is_the_same_object_until_something_changes() -> None:
    world = World()
    first = world.fleet.snapshot(1.0)
    assert world.fleet.snapshot(1.0) is first
    _, stay = world.stay(1.0)
    second = world.fleet.snapshot(1.0)
    assert second.version > first.version
    assert second.pools[1] is first.pools[1], "only what changed is drawn again"
    assert second.pools[0].nodes[1] is first.pools[0].nodes[1]
    stay.end(True, 1.1)


def test_a_queue_is_seen_and_not_by_those_who_are_through_it() -> None:
    world = World()
    world.fleet.snapshot(0.0)
    world.waiting["fast"] = 3
    assert world.view(0.0).queued == 3
    assert world.view(0.0, "slow-0").queued == 0
    assert world.view(0.0, inside="fast").queued == 0
    assert world.view(0.0, inside="slow").queued == 3
    assert world.fleet.snapshot(0.0, "fast") is world.fleet.snapshot(0.0, "fast")


def test_an_old_word_about_load_is_no_word() -> None:
    world = World()
    load = EngineLoad(running=2)
    world.node.told(load, 1.0)
    world.fleet.changed(world.node)
    assert world.view(4.9).load == load
    assert world.view(5.0).load == EngineLoad()
    world.node.told(EngineLoad(running=1), 5.5)
    world.fleet.changed(world.node)
    assert world.view(5.6).load.running == 1


def test_a_breaker_that_half_opens_by_itself_is_seen() -> None:
    world = World()
    for _ in range(2):
        world.node.breaker.failure(1.0)
    world.fleet.changed()
    assert world.view(1.0).health is Health.OPEN
    assert world.view(2.9).health is Health.OPEN
    assert world.view(3.0).health is Health.HALF_OPEN


def test_backlog_in_front_of_prefill_is_part_of_the_prediction() -> None:
    world = World()
    world.model = LatencyModel()
    seed: Mapping[str, PoolSeed] = {"fast": PoolSeed(ttft_ms=100, tpot_ms=10, ttft_ms_per_token=1.0)}
    world.fleet.latency = LatencyModel(seed)
    world.fleet._picture._latency = world.fleet.latency
    ask = RequestView("r", "m", "/", 10)
    assert world.fleet.predict(ask, "fast", "fast-1", 0.0) == Prediction(110.0, 10.0, 0.0)
    _, stay = world.stay()
    assert world.fleet.predict(ask, "fast", "fast-1", 0.0).ttft_ms == 510.0
    stay.prefilled(0.0, 400, None, 0.1)
    assert world.fleet.predict(ask, "fast", "fast-1", 0.1).ttft_ms == 110.0


def test_a_request_that_moves_counts_where_it_is() -> None:
    world = World()
    _, stay = world.stay()
    other = world.fleet.pools["fast"].nodes["fast-1"]
    stay.leave(0.2)
    assert (world.node.in_flight, world.node.pending_tokens, world.view(0.2).remaining_tokens) == (0, 0, 0)
    stay.join(other, 0.2)
    assert (world.node.in_flight, other.in_flight) == (0, 1)
    assert world.view(0.2, "fast-1").remaining_tokens == 50
    stay.end(True, 0.5)
    assert (world.node.in_flight, other.in_flight, other.stays) == (0, 0, {})


def test_a_node_is_not_blamed_for_a_slow_prefill_instance() -> None:
    world = World()
    ask = RequestView("r", "m", "/", 10)
    _, stay = world.stay()
    assert (world.fleet.predict(ask, "fast", "fast-0", 3.0).tpot_ms or 0) > 1000, "the claim is the node's business"
    stay.prefilling(3.0)
    assert world.fleet.predict(ask, "fast", "fast-0", 30.0).tpot_ms == 10.0
    assert world.model.freeze(30.0).nodes[PREFILL, "prefill"].due_s < 4.0
    stay.prefilled(3.0, 400, None, 30.0)
    assert world.fleet.predict(ask, "fast", "fast-0", 30.4).tpot_ms == 10.0
    assert (world.fleet.predict(ask, "fast", "fast-0", 32.0).tpot_ms or 0) > 1000
    stay.end(False, 33.0)
    nodes = world.model.freeze(33.0).nodes
    assert nodes["fast", "fast-0"].due_s == nodes[PREFILL, "prefill"].due_s == float("inf")
