"""Goodput of the default policy on public traces, against simple policies and an oracle.

::

    python bench/lab.py --data DIR                     # every scenario: DIR holds the traces (see bench/scenarios)
    python bench/lab.py --data DIR --part tuning       # only those that policies may be tuned on
    python bench/lab.py --data DIR --out bench/results/lab-2026-01-31.json

The traces are not part of the project: mooncake_conversation_head.jsonl is the beginning of the conversation trace of
https://github.com/kvcache-ai/Mooncake (FAST25-release/traces), azure_conv_2023_head.csv that of AzureLLMInferenceTrace_conv.csv
of https://github.com/Azure/AzurePublicDataset. Without --data one synthetic scenario runs.
"""  # noqa: E501 - addresses

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pdhub import registry as plugins
from pdhub.config.build import Plan, build_plan, parse_config
from pdhub.core.slo_classes import PRESETS
from pdhub.registry import Registry
from pdhub.simulate.baselines import baselines
from pdhub.simulate.compare import compare, row
from pdhub.simulate.cost import Costs, parse_costs
from pdhub.simulate.lab import Contender, World, of_plan, oracle, simulate
from pdhub.simulate.result import Result
from pdhub.simulate.traces import Item, rate, read_trace
from pdhub.simulate.truth import Truth
from pdhub.simulate.workload import Class, Mix, arrivals
from pdhub.testing import toy

SCENARIOS = Path(__file__).parent / "scenarios"
STEP = 1.12
"""Between two loads that the search for the knee tries."""

SYNTHETIC = "synthetic:requests=1500,rate=4,prompt=1200,output=220,burst=2"


@dataclass(frozen=True)
class Scenario:
    name: str
    held_out: bool
    items: Sequence[Item]
    plan: Plan
    costs: Costs
    truth: Truth
    mix: Mix
    seeds: Sequence[int]
    loads: Sequence[float]
    knee: float
    threshold_ms: float

    @property
    def world(self) -> World:
        return World(self.plan, self.costs, self.truth)

    def contenders(self) -> list[Contender]:
        return [of_plan(self.plan, "slo"), *baselines(self.plan.config, self.threshold_ms), oracle()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="directory with the traces")
    parser.add_argument("--part", choices=("tuning", "held-out", "all"), default="all")
    parser.add_argument("--scenario", action="append", help="only these; may be repeated")
    parser.add_argument("--seeds", type=int, help="only so many seeds")
    parser.add_argument("--loads", help="instead of the scenario's, such as 1.0 or 0.7,1.0")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the policy under test")
    parser.add_argument("--policies", help="only these, such as slo,oracle")
    parser.add_argument("--knees", type=Path, help="JSON with the knees of an earlier run, to save the search")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()

    registry = plugins.load(extra=[toy], warn=False)
    options = dict(yaml.safe_load(f"{{{word.replace('=', ': ', 1)}}}").popitem() for word in args.option)
    known = json.loads(args.knees.read_text())["knees"] if args.knees else {}
    report: dict[str, Any] = {"knees": {}, "scenarios": {}}
    for scenario in _scenarios(args, registry, options):
        began = time.perf_counter()
        knee = known.get(scenario.name) or find_knee(scenario)
        report["knees"][scenario.name] = knee
        loads = [float(text) for text in args.loads.split(",")] if args.loads else scenario.loads
        entry = report["scenarios"][scenario.name] = {
            "held_out": scenario.held_out,
            "knee_per_s": knee * rate(scenario.items),
            "loads": {str(load): _run(scenario, knee * load, args.policies) for load in loads},
        }
        _print(scenario, entry, time.perf_counter() - began)
        report["summary"] = summary(report["scenarios"])
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"], indent=2))


def find_knee(scenario: Scenario) -> float:
    """How many times faster than recorded the trace may run until the oracle attains less than the share wanted."""
    speed = 4.0 / rate(scenario.items)
    tried: dict[int, bool] = {}

    def holds(step: int) -> bool:
        if step not in tried:
            got = [_oracle(scenario, speed * STEP**step, seed) for seed in scenario.seeds]
            tried[step] = statistics.fmean(got) >= scenario.knee
        return tried[step]

    low, high = -16, 24
    if not holds(low):
        raise SystemExit(f"{scenario.name}: the oracle never attains {scenario.knee:.0%}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return speed * STEP**low


def _oracle(scenario: Scenario, speed: float, seed: int) -> float:
    requests = arrivals(scenario.items, scenario.mix, speed=speed, seed=seed)
    world = dataclasses.replace(scenario.world, seed=seed)
    return simulate(world, oracle(), requests).total.attainment


def _run(scenario: Scenario, speed: float, only: str | None) -> dict[str, Any]:
    contenders = scenario.contenders()
    if only:
        contenders = [c for c in contenders if c.name in only.split(",")]
    found = compare(scenario.world, contenders, scenario.items, scenario.mix, speed=speed, seeds=scenario.seeds)
    return {"offered_per_s": speed * rate(scenario.items), **verdict(found)}


def verdict(found: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """A row a policy, and what the policy under test makes of the best simple one and of the oracle."""
    rows = {name: row(results) for name, results in found.items()}
    goodput = {name: r.goodput for name, r in rows.items()}
    simple = {name: value for name, value in goodput.items() if name not in ("slo", "oracle")}
    out: dict[str, Any] = {
        "policies": {
            name: {
                "goodput": r.goodput,
                "goodput_stdev": r.spread,
                "attainment": r.attainment,
                "classes": dict(r.classes),
                "ttft_p50_ms": r.ttft_p50,
                "ttft_p99_ms": r.ttft_p99,
                "tpot_p50_ms": r.tpot_p50,
                "tpot_p99_ms": r.tpot_p99,
                "refused": r.refused,
                "slots_in_use": dict(r.utilisation),
                "cost_per_good": r.cost_per_good,
            }
            for name, r in rows.items()
        }
    }
    if "slo" in goodput and simple:
        best = max(simple, key=simple.__getitem__)
        out["best_simple"] = best
        out["slo_by_best_simple"] = goodput["slo"] / simple[best]
    if "slo" in goodput and "oracle" in goodput:
        out["slo_by_oracle"] = goodput["slo"] / goodput["oracle"]
    return out


def summary(scenarios: Mapping[str, Any]) -> dict[str, Any]:
    """Geometric means over scenarios, by part and load."""
    out: dict[str, Any] = {}
    for part, held in (("tuning", False), ("held-out", True)):
        mine = [s for s in scenarios.values() if s["held_out"] is held]
        for load in sorted({name for s in mine for name in s["loads"]}):
            for ratio in ("slo_by_best_simple", "slo_by_oracle"):
                values = [s["loads"][load][ratio] for s in mine if ratio in s["loads"].get(load, {})]
                if values:
                    out.setdefault(part, {}).setdefault(load, {})[ratio] = round(statistics.geometric_mean(values), 4)
    return out


def _print(scenario: Scenario, entry: Mapping[str, Any], took_s: float) -> None:
    part = "held out" if scenario.held_out else "tuning"
    print(f"\n{scenario.name} ({part}): knee at {entry['knee_per_s']:.2f} requests/s; {took_s:.0f} s")
    for load, result in entry["loads"].items():
        names = sorted(result["policies"], key=lambda n: -result["policies"][n]["goodput"])
        shown = "  ".join(
            f"{n} {result['policies'][n]['goodput']:.2f} ({result['policies'][n]['attainment']:.0%})" for n in names
        )
        ratios = "".join(
            f"  {label} {result[key]:.2f}"
            for key, label in (("slo_by_best_simple", "slo/best simple"), ("slo_by_oracle", "slo/oracle"))
            if key in result
        )
        print(f"  load {load} ({result['offered_per_s']:.2f}/s): {shown}{ratios}")
    sys.stdout.flush()


def _scenarios(args: argparse.Namespace, registry: Registry, options: Mapping[str, Any]) -> list[Scenario]:
    common = yaml.safe_load((SCENARIOS / "common.yaml").read_text())
    if args.data is None:
        raw = yaml.safe_load((SCENARIOS / "azure-mixed.yaml").read_text())
        raw["trace"] = {"file": SYNTHETIC}
        made = [_scenario("synthetic", {**common, **raw, "seeds": [0, 1]}, None, registry, options)]
    else:
        paths = sorted(path for path in SCENARIOS.glob("*.yaml") if path.name != "common.yaml")
        raws = {path.stem: {**common, **yaml.safe_load(path.read_text())} for path in paths}
        wanted = {"tuning": (False,), "held-out": (True,), "all": (False, True)}[args.part]
        names = [
            n for n, raw in raws.items() if raw["held_out"] in wanted and (not args.scenario or n in args.scenario)
        ]
        made = [_scenario(name, raws[name], args.data, registry, options) for name in names]
    if args.seeds:
        made = [dataclasses.replace(s, seeds=s.seeds[: args.seeds]) for s in made]
    return made


def _scenario(
    name: str, raw: Mapping[str, Any], data: Path | None, registry: Registry, options: Mapping[str, Any]
) -> Scenario:
    trace = raw["trace"]
    source = trace["file"] if data is None else str(data / trace["file"])
    classes = []
    for cls, share in raw["mix"].items():
        own = raw.get("classes", {}).get(cls)
        targets = PRESETS[cls] if own is None else (own.get("ttft_ms"), own.get("tpot_ms"))
        classes.append(Class(cls, share, *targets, priority=(own or {}).get("priority", 0)))
    policy = dict(raw["policy"])
    if options:
        policy["config"] = {**policy.get("config", {}), **options}
    return Scenario(
        name=name,
        held_out=raw["held_out"],
        items=read_trace(source, skip=trace.get("skip", 0), limit=trace.get("limit")),
        plan=_plan(raw, policy, registry),
        costs=parse_costs(raw["costs"]),
        truth=Truth(**raw["truth"]),
        mix=Mix(tuple(classes)),
        seeds=raw["seeds"],
        loads=raw["loads"],
        knee=raw["knee"],
        threshold_ms=raw["threshold_ms"],
    )


def _plan(raw: Mapping[str, Any], policy: Mapping[str, Any], registry: Registry) -> Plan:
    """The engines are never started: their type does not matter."""
    fleet = raw["fleet"]
    pools = [
        {
            "name": pool,
            "cost": raw["cost"][pool],
            "engine": {"type": "toy"},
            "nodes": [{"name": f"{pool}-{i}", "port": 0} for i in range(fleet[pool])],
            "latency": raw["latency"][pool],
        }
        for pool in ("fast", "general")
    ]
    prefill = [{"name": f"prefill-{i}", "port": 0, "engine": {"type": "toy"}} for i in range(fleet["prefill"])]
    return build_plan(
        parse_config({"model": {"name": "m"}, "prefill": prefill, "pools": pools, "policy": policy}), registry
    )


if __name__ == "__main__":
    main()
