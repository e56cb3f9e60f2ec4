"""The latency model against truths that are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pdhub.api.engine import Capabilities
from pdhub.api.policy import NodeView, PoolView, Prediction
from pdhub.api.request import RequestView
from pdhub.core.latency import LatencyModel, PoolSeed, Sample, Tuning

AT_ONCE = Tuning(refresh_s=0.0)
NO_SEED = PoolSeed()


def request(prompt_tokens: int = 1000) -> RequestView:
    return RequestView("r", "m", "/v1/completions", prompt_tokens)


def pool(nodes: int = 2, **view: object) -> PoolView:
    views = tuple(NodeView(f"n{i}", "p", **view) for i in range(nodes))  # type: ignore[arg-type]
    return PoolView("p", frozenset({"m"}), Capabilities(), views, needs_prefill=False)


class World:
    """A truth and a model that watches it.

    Args:
        outliers: share of observations that take 20 times as long.
    """

    def __init__(
        self, seed: PoolSeed = NO_SEED, *, nodes: int = 2, noise: float = 0.15, outliers: float = 0.05, rng: int = 1
    ) -> None:
        self.model = LatencyModel({"p": seed}, AT_ONCE)
        self.pool = pool(nodes, slots=8)
        self.now = 0.0
        self.slow: dict[str, float] = {}
        self._noise, self._outliers = noise, outliers
        self._rng = random.Random(rng)

    def ttft(self, prompt: int) -> float:
        return 50 + 0.2 * prompt

    def tpot(self, running: int, context: float) -> float:
        return 12 + 2 * (running - 1) + 0.001 * context

    def serve(self, count: int, every_s: float = 0.05, node: str | None = None) -> None:
        for _ in range(count):
            self.now += every_s
            at = node or self._rng.choice(self.pool.nodes).name
            prompt, running = self._rng.randint(50, 4000), self._rng.randint(1, 8)
            factor = self.slow.get(at, 1.0) * self._rng.lognormvariate(0, self._noise)
            if self._rng.random() < self._outliers:
                factor *= 20
            self.model.observe(
                Sample(
                    "p",
                    at,
                    self.now,
                    prompt_tokens=prompt,
                    ttft_ms=self.ttft(prompt) * factor,
                    tpot_ms=self.tpot(running, prompt) * factor,
                    running=running,
                    context_tokens=prompt,
                    output_tokens=200,
                )
            )
            self.model.freeze(self.now)

    def predict(self, node: int = 0, prompt: int = 1000, after_s: float = 0.0) -> Prediction:
        now = self.now + after_s
        return self.model.freeze(now).predict(request(prompt), self.pool, self.pool.nodes[node], now)

    def ratios(self, node: int = 0, factor: float = 1.0) -> list[float]:
        """Predicted over true, for short and long prompts."""
        out = []
        for prompt in (500, 1000, 3000):
            seen = self.predict(node, prompt)
            assert seen.ttft_ms is not None
            assert seen.tpot_ms is not None
            out += [seen.ttft_ms / self.ttft(prompt) / factor, seen.tpot_ms / self.tpot(1, prompt) / factor]
        return out


SEEDS = [PoolSeed(), PoolSeed(ttft_ms=80, tpot_ms=6), PoolSeed(ttft_ms=50, tpot_ms=24, ttft_ms_per_token=0.4)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rng", range(5))
def test_learns_noisy_truth_with_outliers(seed: PoolSeed, rng: int) -> None:
    world = World(seed, rng=rng)
    world.serve(200)
    assert all(0.7 < ratio < 1.4 for ratio in world.ratios()), world.ratios()


def test_seed_is_the_prediction_until_something_was_observed() -> None:
    world = World(PoolSeed(ttft_ms=80, tpot_ms=6, ttft_ms_per_token=0.1))
    assert world.predict(prompt=100) == Prediction(90.0, 6.0, 0.0)


def test_without_seed_and_observations_nothing_is_known() -> None:
    assert World().predict() == Prediction(None, None, 0.0)


@pytest.mark.parametrize("rng", range(8))
def test_jump_of_one_node_is_noticed_within_20_of_its_observations(rng: int) -> None:
    world = World(rng=rng)
    world.serve(200)
    world.slow["n0"] = 5.0
    world.serve(20, node="n0")
    assert all(0.6 < ratio < 1.6 for ratio in world.ratios(0, 5.0)), world.ratios(0, 5.0)
    assert all(0.6 < ratio < 1.6 for ratio in world.ratios(1)), "the other node is as it was"
    del world.slow["n0"]
    world.serve(20, node="n0")
    assert all(0.6 < ratio < 1.6 for ratio in world.ratios(0)), "recovered"


@pytest.mark.parametrize("rng", range(8))
def test_outliers_alone_move_nothing(rng: int) -> None:
    world = World(rng=rng, noise=0.02)
    worst = 0.0
    world.serve(100)
    for _ in range(100):
        world.serve(1)
        worst = max(worst, *world.ratios())
    assert worst < 2.0


def test_drift_is_followed() -> None:
    world = World(noise=0.1)
    world.serve(200)
    for step in range(300):
        world.slow = dict.fromkeys(("n0", "n1"), 1 + step / 100)
        world.serve(1)
    assert all(0.7 < ratio < 1.4 for ratio in world.ratios(0, 4.0)), world.ratios(0, 4.0)


def test_stale_knowledge_gives_way_to_the_long_run_then_to_the_seed() -> None:
    world = World(PoolSeed(ttft_ms=80, tpot_ms=6), outliers=0.0)
    world.serve(300)
    world.slow = dict.fromkeys(("n0", "n1"), 5.0)
    world.serve(12)
    fresh, older, ancient = world.predict(), world.predict(after_s=11), world.predict(after_s=121)
    assert fresh.tpot_ms is not None
    assert older.tpot_ms is not None
    assert fresh.tpot_ms > 40 > 25 > older.tpot_ms
    assert ancient == Prediction(80.0, 6.0, 0.0)


def test_stale_knowledge_without_a_seed_is_unknown() -> None:
    world = World()
    world.serve(50)
    assert world.predict(after_s=121) == Prediction(None, None, 0.0)


def test_a_node_never_seen_is_like_its_pool() -> None:
    world = World(nodes=3, outliers=0.0)
    world.serve(60, node="n0")
    world.serve(60, node="n1")
    assert all(0.7 < ratio < 1.4 for ratio in world.ratios(2)), world.ratios(2)


SENSELESS = [float("nan"), float("inf"), -1.0, 0.0, 1e300]


@pytest.mark.parametrize("value", SENSELESS)
def test_senseless_numbers_teach_nothing(value: float) -> None:
    world = World(PoolSeed(ttft_ms=80, tpot_ms=6))
    world.model.observe(Sample("p", "n0", 1.0, ttft_ms=value, tpot_ms=value, running=value))
    assert world.predict() == Prediction(80.0, 6.0, 0.0)


def waiting(**view: int) -> Callable[[PoolSeed], Prediction]:
    def ask(seed: PoolSeed) -> Prediction:
        model = LatencyModel({"p": seed}, AT_ONCE)
        fleet = pool(1, **view)
        return model.freeze(0.0).predict(request(), fleet, fleet.nodes[0], 0.0)

    return ask


def test_wait_at_a_batch_1_node_comes_from_what_runs() -> None:
    seed = PoolSeed(ttft_ms=80, tpot_ms=4, output_tokens=100)
    assert waiting(slots=1, in_flight=0)(seed).wait_ms == 0
    assert waiting(slots=1, in_flight=1, remaining_tokens=50)(seed) == Prediction(280.0, 4.0, 200.0)
    assert waiting(slots=1, in_flight=1)(seed).wait_ms == 200, "not told: half of a typical answer"
    assert waiting(slots=1, in_flight=2, remaining_tokens=150)(seed).wait_ms == 600
    assert waiting(slots=1, in_flight=1, queued=2, remaining_tokens=50)(seed).wait_ms == 200 + 2 * 400
    assert waiting(slots=2, in_flight=2, remaining_tokens=100)(seed).wait_ms == 100, "two run down together"
    assert waiting(slots=1, in_flight=1)(PoolSeed(ttft_ms=80, tpot_ms=4)) == Prediction(None, 4.0, None)


def test_a_stalled_node_is_slow_at_once_and_well_again_at_once() -> None:
    world = World(PoolSeed(ttft_ms=80, tpot_ms=6))
    world.model.begin("p", "n0", "a", first_by_s=0.1)
    world.model.progress("p", "n0", "a", 0.1)
    assert world.predict(after_s=0.5) == Prediction(80.0, 6.0, 0.0)
    assert world.predict(after_s=2.1) == Prediction(2080.0, 2000.0, 0.0)
    assert world.predict(node=1, after_s=2.1) == Prediction(80.0, 6.0, 0.0)
    world.model.progress("p", "n0", "a", 2.2)
    assert world.predict(after_s=2.3) == Prediction(80.0, 6.0, 0.0)
    world.model.end("p", "n0", "a")
    assert world.predict(after_s=60) == Prediction(80.0, 6.0, 0.0), "nothing runs: it owes nothing"
