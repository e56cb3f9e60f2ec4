"""What the latency model costs, and how well it predicts. Goal: about 1 µs a prediction.

Times are of the CPU, medians. The worlds of the second table are synthetic: TTFT grows with the prompt, TPOT with the
requests that run and with the context; noise is log-normal (15 %), 5 % of all observations take 20 times as long.

python bench/latency.py [--runs 50] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdhub.api import Capabilities, NodeView, PoolView, RequestView
from pdhub.core.latency import LatencyModel, PoolSeed, Sample, Tuning

GOAL_US = 1.0


def median_us(run: Callable[[], object], runs: int, calls: int = 1) -> float:
    times = []
    for _ in range(runs):
        start = time.process_time_ns()
        run()
        times.append((time.process_time_ns() - start) / 1000 / calls)
    return statistics.median(times)


def costs(runs: int) -> dict[str, float]:
    rows = {}
    request = RequestView("r", "m", "/v1/completions", 1000)
    for size in (8, 64, 1000):
        model = LatencyModel({"p": PoolSeed(ttft_ms=80, tpot_ms=10, output_tokens=200)}, Tuning(refresh_s=0.0))
        nodes = tuple(NodeView(f"n{n}", "p", slots=8, in_flight=n % 12, remaining_tokens=200) for n in range(size))
        pool = PoolView("p", frozenset({"m"}), Capabilities(), nodes)
        for node in nodes:
            for at in range(12):
                model.observe(Sample("p", node.name, at / 10, prompt_tokens=100, ttft_ms=100.0, tpot_ms=10.0))
        table = model.freeze(2.0)
        predict, predict_all = table.predict, table.predict_all
        rows[f"predict, one of {size} nodes"] = median_us(
            lambda predict=predict, pool=pool, nodes=nodes: [predict(request, pool, n, 2.0) for n in nodes], runs, size
        )
        rows[f"predict_all, one of {size} nodes"] = median_us(
            lambda predict_all=predict_all, pool=pool, nodes=nodes: predict_all(request, pool, nodes, 2.0), runs, size
        )

        def observe_and_freeze(model: LatencyModel = model) -> None:
            model.observe(Sample("p", "n0", 2.0, prompt_tokens=100, ttft_ms=100.0, tpot_ms=10.0))
            model.freeze(2.0)

        rows[f"observe and freeze, {size} nodes, one changed"] = median_us(observe_and_freeze, runs)
    model = LatencyModel({"p": PoolSeed(ttft_ms=80, tpot_ms=10)})
    sample = Sample("p", "n0", 2.0, prompt_tokens=100, ttft_ms=100.0, tpot_ms=10.0)
    rows["observe"] = median_us(lambda: [model.observe(sample) for _ in range(100)], runs, 100)
    return rows


def quality(seed: PoolSeed, rng_seed: int) -> dict[str, float]:
    """Median and 90th percentile of the larger of predicted/true and true/predicted, steady and after a jump ×5."""
    rng = random.Random(rng_seed)
    model = LatencyModel({"p": seed}, Tuning(refresh_s=0.0))
    node = NodeView("n0", "p", slots=8)
    pool = PoolView("p", frozenset({"m"}), Capabilities(), (node,), needs_prefill=False)
    slow, now, steady, jumped, noticed = 1.0, 0.0, [], [], 0
    for n in range(400):
        if n == 200:
            slow = 5.0
        now += 0.05
        prompt, running = rng.randint(50, 4000), rng.randint(1, 8)
        view = NodeView("n0", "p", slots=8, in_flight=running - 1)
        seen = model.freeze(now).predict(RequestView("r", "m", "/", prompt), pool, view, now)
        ttft, tpot = (50 + 0.2 * prompt) * slow, (12 + 2 * (running - 1) + 0.001 * prompt) * slow
        ratios = [max(p / t, t / p) for p, t in ((seen.ttft_ms, ttft), (seen.tpot_ms, tpot)) if p]
        if 50 <= n < 200:
            steady += ratios
        elif n >= 220:
            jumped += ratios
        if n >= 200 and not noticed and ratios and max(ratios) < 2:
            noticed = n - 200
        factor = rng.lognormvariate(0, 0.15) * (20 if rng.random() < 0.05 else 1)
        model.observe(
            Sample(
                "p", "n0", now, prompt_tokens=prompt, ttft_ms=ttft * factor, tpot_ms=tpot * factor, running=running,
                context_tokens=prompt,
            )
        )  # fmt: skip
    return {
        "steady p50": statistics.median(steady),
        "steady p90": sorted(steady)[int(0.9 * len(steady))],
        "after a jump p50": statistics.median(jumped),
        "after a jump p90": sorted(jumped)[int(0.9 * len(jumped))],
        "observations until noticed": noticed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"us": costs(args.runs), "ratio": {}}
    for name, us in result["us"].items():
        verdict = ""
        if name.startswith("predict"):
            verdict = f"   goal {GOAL_US} µs: " + ("met" if us <= GOAL_US * 1.05 else "missed")
        print(f"{name:48} {us:9.2f} µs{verdict}")
    seeds = {
        "no seed": PoolSeed(),
        "seed half as long": PoolSeed(ttft_ms=25, tpot_ms=6, ttft_ms_per_token=0.1, tpot_ms_per_request=1),
        "seed twice as long": PoolSeed(ttft_ms=100, tpot_ms=24, ttft_ms_per_token=0.4, tpot_ms_per_request=4),
    }
    for name, seed in seeds.items():
        runs = [quality(seed, n) for n in range(5)]
        row = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
        result["ratio"][name] = row
        print(f"{name:20} " + "  ".join(f"{key} {value:.2f}" for key, value in row.items()))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
