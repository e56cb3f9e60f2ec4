"""Several policies in the same worlds, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdhub.simulate.lab import Contender, World, simulate
from pdhub.simulate.result import Result
from pdhub.simulate.traces import Item
from pdhub.simulate.workload import Mix, arrivals


@dataclass(frozen=True, slots=True)
class Row:
    """One policy over all seeds; every number is a mean.

    Args:
        spread: standard deviation of goodput between seeds.
        attainment: by class. best_ratio: goodput by the first policy's.
    """

    policy: str
    goodput: float
    spread: float
    offered: float
    attainment: float
    classes: Mapping[str, float]
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    refused: float
    utilisation: Mapping[str, float]
    cost_per_good: float | None


def compare(
    world: World,
    contenders: Sequence[Contender],
    items: Sequence[Item],
    mix: Mix,
    *,
    speed: float = 1.0,
    seeds: Iterable[int] = (0,),
    told: Callable[[Result], None] = lambda result: None,
) -> dict[str, list[Result]]:
    """Results by policy, one a seed. ``told`` hears of each run when it is done."""
    found: dict[str, list[Result]] = {contender.name: [] for contender in contenders}
    for seed in seeds:
        requests = arrivals(items, mix, speed=speed, seed=seed)
        for contender in contenders:
            result = simulate(replace(world, seed=seed), contender, requests)
            found[contender.name].append(result)
            told(result)
    return found


def row(results: Sequence[Result]) -> Row:
    """Mean of one policy's runs."""
    goodput = [r.goodput for r in results]
    names = sorted({name for r in results for name in r.classes})
    pools = list(results[0].pools)
    return Row(
        policy=results[0].policy,
        goodput=statistics.fmean(goodput),
        spread=statistics.stdev(goodput) if len(goodput) > 1 else 0.0,
        offered=statistics.fmean(r.offered for r in results),
        attainment=statistics.fmean(r.total.attainment for r in results),
        classes={n: statistics.fmean(r.classes[n].attainment for r in results if n in r.classes) for n in names},
        ttft_p50=_mean(r.total.ttft_ms.p50 for r in results),
        ttft_p99=_mean(r.total.ttft_ms.p99 for r in results),
        tpot_p50=_mean(r.total.tpot_ms.p50 for r in results),
        tpot_p99=_mean(r.total.tpot_ms.p99 for r in results),
        refused=statistics.fmean(1 - r.total.completed / r.total.requests for r in results),
        utilisation={p: statistics.fmean(r.pools[p].slots for r in results) for p in pools},
        cost_per_good=_mean(r.cost_per_good for r in results),
    )


def data(found: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """For JSON: a row a policy, and every run."""
    return {
        "policies": [_row_data(row(results)) for results in found.values()],
        "runs": [result.data() for results in found.values() for result in results],
    }


def _row_data(found: Row) -> dict[str, Any]:
    return {name: getattr(found, name) for name in found.__slots__}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None
