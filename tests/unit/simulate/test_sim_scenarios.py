"""The benchmark's scenarios load, and its numbers are what they are called."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

BENCH = Path(__file__).parents[3] / "bench"
NAMES = sorted(path.stem for path in (BENCH / "scenarios").glob("*.yaml") if path.stem != "common")


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("bench_lab", BENCH / "lab.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def raw(name: str) -> dict[str, Any]:
    common = yaml.safe_load((BENCH / "scenarios" / "common.yaml").read_text())
    return {**common, **yaml.safe_load((BENCH / "scenarios" / f"{name}.yaml").read_text())}


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_is_complete(bench: ModuleType, registry: Any, name: str) -> None:
    found = raw(name)
    found["trace"] = {"file": "synthetic:requests=40,rate=2,prompt=300,output=20"}
    scenario = bench._scenario(name, found, None, registry, {})
    assert len(scenario.seeds) == 5
    assert len(scenario.loads) == 3
    assert sum(c.share for c in scenario.mix.classes) == pytest.approx(1)
    names = [c.name for c in scenario.contenders()]
    assert names == ["slo", "throughput-only", "fast-then-spill", "tpot-threshold", "round-robin", "oracle"]
    for pool in ("fast", "general"):
        assert scenario.costs.pool(pool) is not None


def test_half_of_the_scenarios_are_held_out() -> None:
    held = [raw(name)["held_out"] for name in NAMES]
    assert sum(held) * 2 == len(held)


def test_a_small_run_gives_a_verdict(bench: ModuleType, registry: Any) -> None:
    found = {**raw("azure-mixed"), "seeds": [0]}
    found["trace"] = {"file": "synthetic:requests=120,rate=6,prompt=300,output=60"}
    scenario = bench._scenario("small", found, None, registry, {"margin": 0.8})
    result = bench._run(scenario, 1.0, None)
    simple = {n: p["goodput"] for n, p in result["policies"].items() if n not in ("slo", "oracle")}
    assert result["slo_by_best_simple"] == pytest.approx(result["policies"]["slo"]["goodput"] / max(simple.values()))
    summary = bench.summary({"small": {"held_out": True, "loads": {"1.0": result}}})
    assert set(summary["held-out"]["1.0"]) == {"slo_by_best_simple", "slo_by_oracle"}
