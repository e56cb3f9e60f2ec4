"""How long one choice takes, and what the memory of prefix affinity grows to. Goals: 2 pools × 4 nodes ≤ 60 µs,
64 nodes ≤ 300 µs, 1,000 nodes ≤ 4 ms (median).

Times are of the CPU: a choice waits for nothing, so that they are wall times on a core that nobody else uses.

python bench/choose.py [--runs 300] [--prompts 1000000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdhub.api import (
    SLO,
    Capabilities,
    EngineLoad,
    Feature,
    NodeView,
    Policy,
    PoolView,
    RequestRecord,
    RequestView,
    Snapshot,
)
from pdhub.api.plugin import NoConfig
from pdhub.core.latency import LatencyModel, PoolSeed, Sample
from pdhub.policies.affinity import PrefixAffinityConfig, PrefixAffinityScorer
from pdhub.policies.power_of_two import PowerOfTwo
from pdhub.policies.prefill import PrefillChoice, PrefillChoiceConfig
from pdhub.policies.round_robin import RoundRobin, RoundRobinConfig
from pdhub.policies.slo import Slo, SloConfig
from pdhub.policies.weighted import Weighted, WeightedConfig

SIZES = (8, 64, 256, 1000)
GOALS_US = {8: 60.0, 64: 300.0, 1000: 4000.0}
NOW = 100.0


def fleet(nodes: int, role: str = "decode") -> Snapshot:
    """Two pools with half of the nodes each, loads that differ, and a latency model that has learned."""
    rng = random.Random(1)
    model = LatencyModel(
        {
            "fast": PoolSeed(ttft_ms=80, tpot_ms=4, output_tokens=200),
            "general": PoolSeed(ttft_ms=90, tpot_ms=12, tpot_ms_per_request=1.0, output_tokens=200),
        }
    )
    pools = []
    for name, slots, cost in (("fast", 1, 4.0), ("general", 16, 1.0)):
        views = []
        for n in range(nodes // 2):
            node = f"{name}-{n}"
            running = rng.randrange(slots + 1)
            views.append(
                NodeView(node, name, in_flight=running, load=EngineLoad(running=running), slots=slots, pending_tokens=n)
            )
            tpot = 4.0 if name == "fast" else 12.0 + running
            model.observe(Sample(name, node, NOW, 500, ttft_ms=90.0, tpot_ms=tpot, running=running + 1))
        capabilities = Capabilities(frozenset(Feature), 131_072, 20, slots * len(views))
        pools.append(PoolView(name, frozenset({"m"}), capabilities, tuple(views), role=role, cost=cost))
    return Snapshot(1, tuple(pools), model.freeze(NOW))


def requests() -> list[RequestView]:
    """With and without targets, tight and loose."""
    slos = [SLO(), SLO(tpot_ms=6.0), SLO(ttft_ms=500.0, tpot_ms=30.0), SLO(ttft_ms=10.0, tpot_ms=1.0)]
    return [
        RequestView(
            f"request-{n}", "m", "/v1/chat/completions", prompt_tokens=500, slo=slos[n % 4], arrived_s=NOW - 0.001,
            prefix=tuple(range(8)), session=f"s{n}",
        )
        for n in range(40)
    ]  # fmt: skip


def microseconds(policy: Policy, snapshot: Snapshot, runs: int) -> list[float]:
    """Time of each of ``runs`` choices."""
    asked, rng, times = requests(), random.Random(0), []
    for n in range(runs):
        request = asked[n % len(asked)]
        start = time.thread_time_ns()
        policy.choose(request, snapshot, NOW, rng)
        times.append((time.thread_time_ns() - start) / 1000)
    return times


def composed() -> dict[str, Policy]:
    """The default configuration, and one with a rule, filters and scorers in front of it."""
    from pdhub.config.build import build_plan
    from pdhub.config.models import Config
    from pdhub.policies.compose import compose
    from pdhub.registry import load

    def made(policy: dict[str, Any]) -> Policy:
        node = {"port": 0}
        pools = [
            {"name": name, "engine": {"type": "openai"}, "nodes": [{"name": f"{name}-0", **node}]}
            for name in ("fast", "general")
        ]
        config = Config.model_validate({"model": {"name": "m"}, "pools": pools, "policy": policy})
        return compose(build_plan(config, load(warn=False)))

    parts = {
        "filters": [{"type": "slo_headroom", "soft": True}],
        "scorers": [{"type": "load"}, {"type": "prefix_affinity", "weight": 2}, {"type": "session_affinity"}],
    }
    return {"composed slo": made({"type": "slo"}), "slo, filter, 3 scorers": made({"type": "slo", **parts})}


def policies() -> dict[str, Policy]:
    return {
        "slo": Slo(SloConfig()),
        "weighted": Weighted(WeightedConfig()),
        "round_robin": RoundRobin(RoundRobinConfig()),
        "power_of_two": PowerOfTwo(NoConfig()),
        "prefill": PrefillChoice(PrefillChoiceConfig()),
    }


def growth(medians: Sequence[float]) -> float:
    """Exponent between the smallest and the largest fleet: 1 is linear."""
    return math.log(medians[-1] / medians[0]) / math.log(SIZES[-1] / SIZES[0])


def affinity(prompts: int) -> dict[str, float]:
    """Entries and memory after so many distinct prompts of 8 blocks, all with the same first one."""
    scorer = PrefixAffinityScorer(PrefixAffinityConfig())
    rng, start = random.Random(2), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n in range(prompts):
        prefix = (7, *(rng.getrandbits(64) for _ in range(7)))
        record = RequestRecord("r", "m", "p", f"n{n % 64}", f"pre{n % 8}", "no-slo", "ok", ttft_ms=1.0, prefix=prefix)
        scorer.observe(record)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
    return {"prompts": prompts, "entries": len(scorer), "grown_mib": round(grown, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"affinity": affinity(options.prompts), "median_us": {}, "p99_us": {}}
    print(
        "affinity: {prompts} distinct prompts, {entries} blocks remembered, {grown_mib} MiB".format(
            **results["affinity"]
        )
    )
    print(f"\n{'median µs (p99)':26}" + "".join(f"{f'{size} nodes':>18}" for size in SIZES) + f"{'growth':>10}")
    for name, policy in {**policies(), **composed()}.items():
        medians, tails = [], []
        for size in SIZES:
            times = microseconds(policy, fleet(size, "prefill" if name == "prefill" else "decode"), options.runs)
            medians.append(statistics.median(times))
            tails.append(sorted(times)[int(len(times) * 0.99)])
        results["median_us"][name] = dict(zip(SIZES, medians, strict=True))
        results["p99_us"][name] = dict(zip(SIZES, tails, strict=True))
        cells = "".join(f"{f'{m:.0f} ({t:.0f})':>18}" for m, t in zip(medians, tails, strict=True))
        print(f"{name:26}{cells}{f'n^{growth(medians):.2f}':>10}")
    print("goal" + " " * 22 + "".join(f"{f'≤ {GOALS_US[s]:.0f}' if s in GOALS_US else '':>18}" for s in SIZES))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
