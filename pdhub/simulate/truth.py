"""How the simulated engines differ from their cost models, and how they drift: what no policy is told."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """For a while, something is so many times slower. ``target``: name of a pool, node or prefill instance."""

    target: str
    start_s: float
    end_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class Truth:
    """Args:
    spread: each pool is slower or faster than its model by up to this share (0.5: between 1/1.5 and 1.5 times).
    nodes: the same for each node beside its pool.
    drift: and swings by this share, over ``period_s``, each pool with a phase of its own.
    prefill: whether prefill instances differ and drift as well.
    """

    spread: float = 0.0
    nodes: float = 0.0
    drift: float = 0.0
    period_s: float = 120.0
    prefill: bool = True
    events: tuple[Event, ...] = ()


class Factor:
    """Times of one node or instance are multiplied by this."""

    __slots__ = ("_base", "_drift", "_events", "_phase", "_turn", "steady")

    def __init__(self, base: float, drift: float, period_s: float, phase: float, events: Sequence[Event]) -> None:
        self._base = base
        self._drift = drift
        self._turn = 2 * math.pi / period_s
        self._phase = phase
        self._events = tuple(events)
        self.steady = not drift and not self._events

    def at(self, now: float) -> float:
        value = self._base
        if self._drift:
            value *= 1 + self._drift * math.sin(self._turn * now + self._phase)
        for event in self._events:
            if event.start_s <= now < event.end_s:
                value *= event.factor
        return value


def factor(truth: Truth, pool: str, name: str, seed: int) -> Factor:
    """The same seed, pool and name give the same factor in every run."""
    prefill = pool == "prefill"
    if prefill and not truth.prefill:
        truth = Truth(events=truth.events)
    group = random.Random(f"truth {seed} {pool}")
    own = random.Random(f"truth {seed} {pool} {name}")
    limit, inner = math.log(1 + truth.spread), math.log(1 + truth.nodes)
    base = math.exp(group.uniform(-limit, limit) + own.uniform(-inner, inner))
    phase = group.uniform(0, 2 * math.pi)
    mine = [event for event in truth.events if event.target in (pool, name)]
    return Factor(base, truth.drift, truth.period_s, phase, mine)
