"""Whole runs: nobody is lost, the same again is the same, and simple worlds come out as they must."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdhub.simulate.baselines import baselines
from pdhub.simulate.compare import compare, data, row
from pdhub.simulate.cost import Costs, parse_costs
from pdhub.simulate.lab import World, of_plan, oracle, simulate
from pdhub.simulate.traces import Item, read_trace
from pdhub.simulate.truth import Truth
from pdhub.simulate.workload import Class, Mix, arrivals

MIX = Mix((Class("quick", 1, 1000, 8), Class("easy", 1, 2000, 60), Class("bulk", 1, priority=-1)))
TRACE = "synthetic:requests=200,rate=6,prompt=500,output=60"


def test_every_request_ends_once_whatever_the_policy(make_plan: Any, costs: Costs) -> None:
    plan = make_plan()
    requests = arrivals(read_trace(TRACE), MIX, speed=4)
    for contender in [of_plan(plan), *baselines(plan.config), oracle()]:
        result = simulate(World(plan, costs, Truth(0.5, 0.1, 0.2), 3), contender, requests)
        assert result.total.requests == 200
        refused = sum(result.total.refused.values())
        assert result.total.completed + refused == 200
        assert sum(pool.requests for pool in result.pools.values()) == result.total.completed
        assert 0 <= result.total.attainment <= 1


def test_the_same_again_is_the_same(make_plan: Any, costs: Costs) -> None:
    plan = make_plan()
    requests = arrivals(read_trace(TRACE), MIX, seed=2)
    world = World(plan, costs, Truth(0.5, 0.1, 0.2), 2)
    assert simulate(world, of_plan(plan), requests) == simulate(world, of_plan(plan), requests)


def test_alone_a_request_sees_exactly_what_the_costs_say(make_plan: Any, costs: Costs) -> None:
    plan = make_plan()
    (request,) = arrivals([Item(0.0, 1000, 101)], Mix((Class("c", tpot_ms=5),), estimate=0.0))
    result = simulate(World(plan, costs), of_plan(plan), [request])
    assert result.classes["c"].ttft_ms.p50 == pytest.approx(10 + 0.05 * 1000 + 5)
    assert result.classes["c"].tpot_ms.p50 == pytest.approx(4)
    assert result.pools["fast"].requests == 1


def test_too_much_is_refused_in_time_and_queues_end(make_plan: Any, costs: Costs) -> None:
    plan = make_plan({"type": "slo_threshold", "config": {"tpot_below_ms": 10, "fast": "fast", "otherwise": "general"}})
    requests = arrivals(
        read_trace("synthetic:requests=400,rate=60,prompt=100,output=100"), Mix((Class("q", 1, 500, 8),))
    )
    result = simulate(World(plan, costs), of_plan(plan), requests)
    assert result.total.refused["rejected-ttl-expired"] > 100
    assert result.total.completed > 0


def test_the_oracle_beats_what_does_not_look(make_plan: Any, costs: Costs) -> None:
    plan = make_plan()
    found = compare(
        World(plan, costs, Truth(0.3, 0.1, 0.1)),
        [*baselines(plan.config), oracle()],
        read_trace("synthetic:requests=200,rate=10,prompt=500,output=60"),
        Mix((Class("quick", 1, 1000, 14), Class("easy", 1, 2000, 60))),
        seeds=range(2),
    )
    for result in found["oracle"]:
        assert result.pools["fast"].calibration["ttft"].p90_ratio < 1.05  # it really knows
    goodput = {name: row(results).goodput for name, results in found.items()}
    assert goodput["oracle"] >= max(goodput.values()) * 0.97


def test_what_json_gets_is_json(make_plan: Any, costs: Costs) -> None:
    plan = make_plan()
    found = compare(World(plan, costs), [of_plan(plan, "mine")], read_trace(TRACE), MIX, seeds=range(2))
    read = json.loads(json.dumps(data(found)))
    assert [p["policy"] for p in read["policies"]] == ["mine"]
    assert len(read["runs"]) == 2
    assert set(read["runs"][0]["classes"]) == {"quick", "easy", "bulk"}


def test_a_late_choice_sees_what_happened_during_prefill(make_plan: Any) -> None:
    """The push of KV fixes the node before prefill, the pull after it: then the node is better known."""
    plan = make_plan({"type": "weighted", "config": {"weights": {"general": 0}}}, nodes=4, prefills=8)
    items = read_trace("synthetic:requests=400,rate=4,prompt=2000,output=60")
    requests = arrivals(items, Mix((Class("c"),)))
    p90 = {}
    for late in (False, True):
        pools = {
            "fast": {"slots": 1, "landings": 4, "tpot_ms": {1: 8}, "late": late},
            "general": {"model": "general-toy"},
        }
        world = World(plan, parse_costs({"prefill": {"ms_per_token": 0.5}, "pools": pools}))
        result = simulate(world, of_plan(plan), requests)
        assert result.total.completed == 400
        p90[late] = result.total.ttft_ms.p90 or 0.0
    assert p90[True] < p90[False] * 0.95
