"""Overload and incidents under a virtual clock: minutes of traffic in a second."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from pdhub.simulate import lab
from pdhub.simulate.cost import Costs, parse_costs
from pdhub.simulate.lab import World, of_plan, simulate
from pdhub.simulate.result import Done
from pdhub.simulate.truth import Event, Truth
from pdhub.simulate.workload import Arrival, Class

TOKENS = 100


@pytest.fixture
def fleet() -> Costs:
    """Two fast nodes make 500 tokens a second, two general ones 800: 13 requests a second in all."""
    return parse_costs(
        {
            "prefill": {"ms": 5, "ms_per_token": 0.02},
            "pools": {"fast": {"slots": 1, "tpot_ms": {1: 4}}, "general": {"slots": 8, "tpot_ms": {1: 10, 8: 20}}},
        }
    )


def stream(cls: Class, rate: float, start_s: float, end_s: float, seed: int) -> list[Arrival]:
    rng, at, made = random.Random(seed), start_s, []
    while (at := at + rng.expovariate(rate)) < end_s:
        tokens = min(4 * TOKENS, 5 + int(rng.expovariate(1 / TOKENS)))
        made.append(Arrival(0, at, 200, tokens, (), cls, 0.0, 200, "t"))
    return made


def merged(*streams: Sequence[Arrival]) -> list[Arrival]:
    every = sorted((a for s in streams for a in s), key=lambda a: a.at_s)
    return [dataclasses.replace(a, number=i) for i, a in enumerate(every)]


def play(world: World, requests: Sequence[Arrival], monkeypatch: pytest.MonkeyPatch) -> list[Done]:
    kept: list[Done] = []
    original = lab._result

    def result(*args: Any) -> Any:
        kept.extend(args[5])
        return original(*args)

    monkeypatch.setattr(lab, "_result", result)
    simulate(world, of_plan(world.plan), requests)
    return kept


def attained(done: Sequence[Done], cls: str, start_s: float, end_s: float) -> float:
    mine = [d.good for d in done if d.request.cls.name == cls and start_s <= d.request.at_s < end_s]
    return sum(mine) / len(mine)


def test_three_times_more_than_fits(make_plan: Any, fleet: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    high, bulk = Class("high", 1, 1000, 25, priority=1), Class("bulk", 1, 4000, priority=-1)
    requests = merged(stream(high, 6, 0, 120, 1), stream(bulk, 1, 0, 120, 2), stream(bulk, 33, 30, 90, 3))
    plan = make_plan(admission={"queue_limit": 64})
    done = play(World(plan, fleet), requests, monkeypatch)
    assert attained(done, "high", 30, 90) >= 0.95
    assert attained(done, "high", 0, 120) >= 0.95
    refused = [d for d in done if d.record.outcome != "ok"]
    assert {d.request.cls.name for d in refused} == {"bulk"}
    # Who is refused is told within its budget; who is refused at the door, at once.
    assert max(d.record.total_ms for d in refused) <= 4000
    # Normal again two seconds after the load ended.
    assert attained(done, "high", 92, 120) >= 0.95
    assert attained(done, "bulk", 92, 120) >= attained(done, "bulk", 0, 30) - 0.15


def test_three_times_more_prompts_than_prefill_computes(
    make_plan: Any, fleet: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode has room for all. The order alone protects the important: `leave` would turn others away earlier."""
    slow = fleet.model_copy(update={"prefill": {"ms": 5, "ms_per_token": 0.975}})  # ten prompts a second, with two
    high, bulk = Class("high", 1, 1200, 100, priority=1), Class("bulk", 1, 6000, priority=-1)
    requests = merged(stream(high, 4.5, 0, 90, 1), stream(bulk, 3, 0, 90, 2), stream(bulk, 23, 20, 60, 3))
    requests = [dataclasses.replace(a, output_tokens=min(a.output_tokens, 20)) for a in requests]
    plan = make_plan({"type": "slo", "config": {"leave": 1000}})
    done = play(World(plan, slow), requests, monkeypatch)
    assert attained(done, "high", 20, 60) >= 0.95
    refused = [d for d in done if d.record.outcome != "ok"]
    assert {(d.request.cls.name, d.record.error_code) for d in refused} <= {
        ("bulk", "shed"),
        ("bulk", "rejected-ttl-expired"),
    }
    assert len(refused) > 600
    assert max(d.record.total_ms for d in refused) <= 6000
    assert attained(done, "bulk", 0, 20) >= 0.95
    assert attained(done, "high", 62, 90) >= 0.95


def sent_to(done: Sequence[Done], target: str, start_s: float, end_s: float) -> list[float]:
    """When requests came that went to this pool or node."""
    mine = [d.request.at_s for d in done if target in (d.record.pool, d.record.node)]
    return [at for at in mine if start_s <= at < end_s]


@pytest.mark.parametrize("target", ["general", "general-0", "general-1"])
def test_a_pool_or_a_node_that_slows_down_is_left_within_two_seconds_of_traffic(
    make_plan: Any, fleet: Costs, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Five times slower from second 30 to 60; now and then somebody tries it again."""
    chat = Class("chat", 1, 1500, 25)
    requests = merged(stream(chat, 3, 0, 120, 4))
    done = play(World(make_plan(), fleet, Truth(events=(Event(target, 30, 60, 5.0),))), requests, monkeypatch)
    first = min(sent_to(done, target, 30, 60), default=60.0)
    assert len(sent_to(done, target, first + 2, 50)) <= 2
    assert attained(done, "chat", 0, 25) == 1.0
    assert attained(done, "chat", 35, 60) > 0.9
    assert attained(done, "chat", 62, 120) > 0.95
    if target == "general":  # the cheap pool: everybody comes back
        assert len(sent_to(done, target, 65, 120)) == sum(65 <= d.request.at_s < 120 for d in done)


@pytest.mark.parametrize("seed", range(4))
def test_a_frozen_node_is_left_within_two_seconds_of_traffic(
    make_plan: Any, fleet: Costs, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    requests = merged(stream(Class("chat", 1, 1500, 25), 3, 0, 60, seed))
    done = play(World(make_plan(), fleet, Truth(events=(Event("general-0", 20, 40, 1e4),))), requests, monkeypatch)
    into = sent_to(done, "general-0", 20, 40)
    assert len([at for at in into if at > into[0] + 2]) <= 1
    assert attained(done, "chat", 43, 60) > 0.95
