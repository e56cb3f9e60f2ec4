"""Shape, level, lengths and errors alone; and that nothing makes the model talk nonsense."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pdhub.api.engine import Capabilities, EngineLoad
from pdhub.api.policy import NodeView, PoolView
from pdhub.api.request import RequestRecord, RequestView
from pdhub.core.latency import PREFILL, LatencyModel, PoolSeed, Sample, Tuning
from pdhub.core.latency_errors import KEPT, Errors
from pdhub.core.latency_lengths import Lengths
from pdhub.core.latency_prefixes import Prefixes
from pdhub.core.latency_shape import Shape

AT_ONCE = Tuning(refresh_s=0.0)


def test_shape_finds_exact_coefficients() -> None:
    shape, rng = Shape(), random.Random(3)
    for _ in range(400):
        u, v = rng.uniform(0, 2000), rng.uniform(0, 500)
        shape.learn(u, v, 40 + 0.1 * u + 0.3 * v)
        shape.fit()
    for u, v in ((0.0, 0.0), (2000.0, 0.0), (0.0, 500.0)):
        assert shape.value(u, v) / shape.value(1000, 250) == pytest.approx((40 + 0.1 * u + 0.3 * v) / 215, rel=0.1)


def test_shape_keeps_a_seeded_slope_that_the_data_do_not_speak_of() -> None:
    shape = Shape((50.0, 0.2, 0.4))
    for _ in range(200):
        shape.learn(100.0, 0.0, 70.0)
        shape.fit()
    assert shape.value(100.0, 0.0) == pytest.approx(70, rel=0.02)
    assert shape.value(100.0, 1000.0) == pytest.approx(470, rel=0.1)


def test_shape_has_no_negative_coefficient() -> None:
    shape = Shape()
    for n in range(100):
        shape.learn(n % 10, 0.0, 100.0 - 5 * (n % 10))
        shape.fit()
    assert min(shape.coefficients) >= 0
    assert shape.value(1e6, 0.0) < 200


def test_lengths_before_anything_ended() -> None:
    assert Lengths().mean() is None
    assert Lengths().remaining(5, cap=20) == 15
    assert Lengths(100.0).remaining(500) == 100
    assert Lengths(100.0).remaining(30, cap=50) == 20


def test_lengths_know_that_a_long_answer_is_a_long_one() -> None:
    lengths = Lengths(7.0)
    for _ in range(50):
        lengths.add(20)
        lengths.add(1000)
    mean, late = lengths.mean(), lengths.remaining(100)
    assert mean is not None
    assert late is not None
    assert mean == pytest.approx(510, rel=0.15)
    assert late == pytest.approx(900, rel=0.15)
    assert lengths.remaining(100, cap=130) == 30
    assert lengths.remaining(100, cap=50) == 0
    assert lengths.remaining(5000) == 2500, "longer than any seen: half as much again"


def test_lengths_forget() -> None:
    lengths = Lengths()
    for tokens in [1000] * 500 + [10] * 700:
        lengths.add(tokens)
    mean = lengths.mean()
    assert mean is not None
    assert mean < 20


def test_errors_are_of_the_latest_predictions() -> None:
    errors = Errors()
    assert errors.summary() is None
    for _ in range(10 * KEPT):
        errors.add(1000.0, 1.0)
    for n in range(KEPT):
        errors.add(110.0 if n % 5 else 200.0, 100.0)
    found = errors.summary()
    assert found is not None
    assert (found.count, found.p50_error_ms, found.p90_error_ms) == (KEPT, 10.0, 100.0)
    assert (found.p50_ratio, found.p90_ratio, found.bias) == (1.1, 2.0, 1.1)


def test_model_reports_its_errors_by_pool_and_metric() -> None:
    model = LatencyModel()
    model.compare("p", "ttft", 120.0, 100.0)
    model.compare("p", "tpot", None, 10.0)
    model.compare("p", "tpot", 10.0, float("nan"))
    assert {key: found.p50_error_ms for key, found in model.errors().items()} == {("p", "ttft"): 20.0}


def test_sample_of_a_record_leaves_the_waits_out() -> None:
    record = RequestRecord(
        "r", "m", "p", "n", None, "slo-met", "ok", prompt_tokens=100, completion_tokens=20, ttft_ms=500.0, tpot_ms=9.0,
        queued_ms=100.0, concurrency=3, extra={"slot_wait_ms": 150.0, "sent_ms": 120.0, "cached_tokens": 60},
    )  # fmt: skip
    sample = Sample.of(record, 7.0)
    assert sample is not None
    assert (sample.ttft_ms, sample.tpot_ms, sample.running, sample.cached_tokens) == (230.0, 9.0, 3.0, 60)
    assert (sample.context_tokens, sample.output_tokens) == (110.0, 20)
    assert Sample.of(RequestRecord("r", "m", None, None, None, "", "rejected"), 7.0) is None


def view(**members: object) -> tuple[PoolView, NodeView]:
    node = NodeView("n0", "p", **members)  # type: ignore[arg-type]
    return PoolView("p", frozenset({"m"}), Capabilities(), (node,)), node


def test_prefix_cache_hits_shorten_what_is_expected() -> None:
    model = LatencyModel({"p": PoolSeed(ttft_ms=10, tpot_ms=1, ttft_ms_per_token=0.1)}, AT_ONCE)
    for n in range(300):
        model.observe(Sample("p", "n0", n / 100, prompt_tokens=1000, cached_tokens=900, ttft_ms=20.0))
    pool, node = view()
    seen = model.freeze(3.0).predict(RequestView("r", "m", "/", 1000), pool, node, 3.0)
    assert seen.ttft_ms == pytest.approx(20.0, rel=0.1)


def test_backlog_at_prefill_is_waited_for() -> None:
    model = LatencyModel({"p": PoolSeed(ttft_ms=10, tpot_ms=1, ttft_ms_per_token=0.1)}, AT_ONCE)
    pool, node = view(pending_tokens=77)
    ask = RequestView("r", "m", "/", 1000)
    table = model.freeze(0.0)
    assert table.predict(ask, pool, node, 0.0).ttft_ms == pytest.approx(110.0)
    assert table.with_backlog(3000).predict(ask, pool, node, 0.0).ttft_ms == pytest.approx(410.0)
    own = PoolView("p", frozenset({"m"}), Capabilities(), (node,), needs_prefill=False)
    assert table.with_backlog(3000).predict(ask, own, node, 0.0).ttft_ms == pytest.approx(117.7)


def test_prefill_instances_are_learned_whatever_their_pool_is_called() -> None:
    model = LatencyModel(tuning=AT_ONCE)
    for n in range(20):
        model.observe(Sample(PREFILL, "n0", n / 10, prompt_tokens=1000, ttft_ms=200.0))
    node = NodeView("n0", "anything")
    pool = PoolView("anything", frozenset({"m"}), Capabilities(), (node,), role="prefill")
    seen = model.freeze(2.0).predict(RequestView("r", "m", "/", 1000), pool, node, 2.0)
    assert seen.ttft_ms == pytest.approx(200.0, rel=0.05)
    assert seen.tpot_ms is None


def test_a_wait_for_a_slot_and_prefill_overlap_only_at_hosted_nodes() -> None:
    seed = PoolSeed(ttft_ms=100, tpot_ms=4)
    pool, node = view(slots=1, in_flight=1, remaining_tokens=50)
    table = LatencyModel({"p": seed}, AT_ONCE).freeze(0.0)
    assert table.predict(RequestView("r", "m", "/", 10), pool, node, 0.0).ttft_ms == 200.0


def test_what_the_engine_says_of_its_load_counts_where_it_is_more() -> None:
    seed = PoolSeed(ttft_ms=100, tpot_ms=4, tpot_ms_per_request=1, output_tokens=100)
    table = LatencyModel({"p": seed}, AT_ONCE).freeze(0.0)
    pool, node = view(slots=4, in_flight=1, load=EngineLoad(running=3))
    assert table.predict(RequestView("r", "m", "/", 10), pool, node, 0.0).tpot_ms == 7.0
    pool, node = view(slots=4, load=EngineLoad(running=4))
    wait = table.predict(RequestView("r", "m", "/", 10), pool, node, 0.0).wait_ms
    assert wait == pytest.approx(50 * 7 / 4), "a quarter of half an answer"


def test_predict_all_is_predict() -> None:
    model = LatencyModel({"p": PoolSeed(ttft_ms=10, tpot_ms=1)}, AT_ONCE)
    nodes = tuple(NodeView(f"n{n}", "p", in_flight=n, slots=4) for n in range(6))
    pool = PoolView("p", frozenset({"m"}), Capabilities(), nodes)
    other = PoolView("q", frozenset({"m"}), Capabilities(), nodes)
    ask = RequestView("r", "m", "/", 10)
    table = model.freeze(0.0)
    assert table.predict_all(ask, pool, nodes, 0.0) == [table.predict(ask, pool, n, 0.0) for n in nodes]
    assert table.predict_all(ask, other, nodes, 0.0) == [table.predict(ask, other, n, 0.0) for n in nodes]


def test_a_table_is_the_same_object_until_it_may_change() -> None:
    model = LatencyModel(tuning=Tuning(refresh_s=0.05))
    sample = Sample("p", "n0", 1.0, ttft_ms=10.0)
    first = model.freeze(1.0)
    model.observe(sample)
    second = model.freeze(1.0)
    model.observe(sample)
    assert first is not second
    assert model.freeze(1.049) is second
    assert model.freeze(1.05) is not second
    assert second.pools["p"].ttft.learned == second.pools["p"].ttft.learned


def test_a_node_that_left_is_forgotten() -> None:
    model = LatencyModel(tuning=AT_ONCE)
    model.observe(Sample("p", "n0", 1.0, ttft_ms=10.0))
    model.begin("p", "n0", "r", 2.0)
    model.forget("p", "n0")
    assert ("p", "n0") not in model.freeze(1.0).nodes


anything = st.floats(allow_nan=True, allow_infinity=True, width=64)
number = st.one_of(st.none(), anything, st.floats(1e-3, 1e6))
tokens = st.integers(-10, 1 << 40)
samples = st.builds(
    Sample,
    st.sampled_from(["p", "q", PREFILL]),
    st.sampled_from(["n0", "n1"]),
    st.floats(0, 1000),
    prompt_tokens=tokens,
    cached_tokens=st.one_of(st.none(), tokens),
    seen_tokens=st.one_of(st.none(), tokens),
    backlog_tokens=tokens,
    ttft_ms=number,
    tpot_ms=number,
    running=anything,
    context_tokens=st.one_of(st.none(), anything),
    output_tokens=st.one_of(st.none(), tokens),
)
seeds = st.builds(
    PoolSeed,
    *[st.one_of(st.none(), st.floats(0, 1e7)) for _ in range(6)],
    st.one_of(st.none(), st.floats(1e-3, 1e7)),
)


@settings(deadline=None, max_examples=60, phases=(Phase.explicit, Phase.generate))
@given(
    st.lists(samples, max_size=12),
    seeds,
    st.integers(0, 1 << 20),
    st.integers(0, 20),
    st.floats(0, 2000),
    st.one_of(st.none(), st.floats(0, 1)),
)
def test_never_nan_and_never_negative(
    seen: list[Sample], seed: PoolSeed, prompt: int, busy: int, now: float, seen_part: float | None
) -> None:
    model = LatencyModel({"p": seed}, AT_ONCE)
    for sample in seen:
        model.observe(sample)
        model.freeze(sample.at_s)
    table = model.freeze(now).with_backlog(prompt)
    for name in ("p", "q"):
        for remaining in (None, 0, 1 << 20):
            node = NodeView("n0", name, in_flight=busy, queued=busy // 2, slots=busy % 5, remaining_tokens=remaining)
            pool = PoolView(name, frozenset({"m"}), Capabilities(), (node,))
            ask = RequestView("r", "m", "/", prompt, seen_tokens=seen_part and int(prompt * seen_part))
            got = table.predict(ask, pool, node, now)
            for value in (got.ttft_ms, got.tpot_ms, got.wait_ms):
                assert value is None or (math.isfinite(value) and value >= 0), got
    left = model.remaining("p", prompt)
    assert left is None or (math.isfinite(left) and left >= 0)


def deep_size(thing: object, seen: set[int]) -> int:
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    size = sys.getsizeof(thing)
    if isinstance(thing, dict):
        return size + sum(deep_size(k, seen) + deep_size(v, seen) for k, v in thing.items())
    if isinstance(thing, list | tuple | set) or type(thing).__name__ == "deque":
        return size + sum(deep_size(item, seen) for item in thing)  # type: ignore[attr-defined]
    for name in getattr(type(thing), "__slots__", ()):
        size += deep_size(getattr(thing, name, None), seen)
    return size + deep_size(getattr(thing, "__dict__", None), seen)


def test_memory_does_not_grow_with_requests() -> None:
    model = LatencyModel({"p": PoolSeed(ttft_ms=10, tpot_ms=1)}, AT_ONCE)

    def serve(count: int) -> int:
        for n in range(count):
            now, node = n / 100, f"n{n % 4}"
            model.begin("p", node, f"r{n}", now)
            model.progress("p", node, f"r{n}", now)
            model.observe(Sample("p", node, now, prompt_tokens=n, ttft_ms=10.0, tpot_ms=1.0, output_tokens=n % 500))
            model.compare("p", "ttft", 10.0, 11.0)
            model.end("p", node, f"r{n}")
            model.end("p", node, "never begun")
            if n % 10 == 0:
                model.freeze(now)
        return deep_size(model, set())

    small, large = serve(1000), serve(5000)
    assert large < small * 1.2
    assert large < 100_000


def test_what_was_sent_before_is_known_by_its_beginnings() -> None:
    prefixes = Prefixes(entries=1000)
    prefixes.add((1, 2, 3, 4))
    assert prefixes.share((1, 2, 3, 4)) == 1.0
    assert prefixes.share((1, 2, 8, 9)) == 0.5
    assert prefixes.share((7, 8)) == 0.0


def test_remembered_prompts_are_bounded_and_shared_beginnings_stay() -> None:
    prefixes = Prefixes(entries=100)
    for n in range(1000):
        prefixes.add((1, 2, 10 * n + 5, 10 * n + 6))
    assert len(prefixes) == 100
    assert prefixes.share((1, 2, 3)) == pytest.approx(2 / 3)
    assert prefixes.share((1, 2, 5, 6)) == 0.5, "the rest of an old one is forgotten"


def test_a_prompt_that_begins_like_another_one_is_expected_sooner_where_caches_hold_it() -> None:
    model = LatencyModel({"p": PoolSeed(ttft_ms=10, tpot_ms=1, ttft_ms_per_token=0.1)}, AT_ONCE)
    prefix = (1, 2, 3, 4)
    assert model.seen_tokens((), 1000) is None
    assert model.seen_tokens(prefix, 1000) == 0
    model.remember(prefix)
    assert model.seen_tokens(prefix, 1000) == 1000
    assert model.seen_tokens((1, 2, 7, 8), 1000) == 500
    pool, node = view()

    def ttft(seen: int | None) -> float | None:
        return model.freeze(9.0).predict(RequestView("r", "m", "/", 1000, seen_tokens=seen), pool, node, 9.0).ttft_ms

    assert ttft(1000) == ttft(0) == pytest.approx(110.0), "nobody has told of a hit yet"
    for n in range(60):
        cached, took = (800, 30.0) if n % 2 else (0, 110.0)
        sample = Sample("p", "n0", n / 10, prompt_tokens=1000, seen_tokens=1000 * (n % 2), cached_tokens=cached)
        model.observe(replace(sample, ttft_ms=took))
    assert ttft(0) == pytest.approx(110.0, rel=0.05)
    assert ttft(1000) == pytest.approx(30.0, rel=0.1)
    assert ttft(500) == pytest.approx(70.0, rel=0.1)
