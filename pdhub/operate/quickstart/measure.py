"""Latencies measured at start: one pool alone, then both under load."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pdhub.operate.quickstart.client import Answer, Endpoint, Question, RequestFailed

FAST_SHARE = 0.7
"""The fast pool's TPOT must be at most this share of the general pool's when that one is full."""

FAST, GENERAL = "fast", "general"
_REPEATS = (
    "Repeat the following text word for word.\n\nThe quick brown fox jumps over the lazy dog while the old lighthouse "
    "keeper collects the names of passing ships. Every evening he writes them into a long book with a blue pen."
)
"""For both pools: text that repeats itself is what the fast pool's speculation is for."""
_RUN_ON = {"ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Seed:
    """TTFT and TPOT of one pool with nothing else running, in milliseconds."""

    pool: str
    ttft_ms: float
    tpot_ms: float

    def overrides(self) -> list[str]:
        """The words that give it to the router's latency model."""
        where = f"pools.{self.pool}.latency"
        return [f"{where}.ttft_ms={self.ttft_ms:.1f}", f"{where}.tpot_ms={self.tpot_ms:.2f}"]


def tight_target(seeds: Sequence[Seed]) -> float:
    """A TPOT target between the two pools: the fast one meets it and the general one does not."""
    return float(f"{math.sqrt(math.prod(seed.tpot_ms for seed in seeds)):.2g}")


@dataclass(frozen=True, slots=True)
class Contrast:
    """TPOT of both pools while the general one serves four requests, in milliseconds."""

    fast_ms: float
    general_ms: float

    @property
    def share(self) -> float:
        return self.fast_ms / self.general_ms

    @property
    def ok(self) -> bool:
        return self.share <= FAST_SHARE

    def sentence(self) -> str:
        figures = f"TPOT with 4 general requests running: fast {self.fast_ms:.0f} ms, general {self.general_ms:.0f} ms"
        verdict = f"fast takes {self.share:.2f} × general"
        if self.ok:
            return f"{figures} ({verdict})"
        return f"{figures}: {verdict}, more than {FAST_SHARE} ×. Is something else using the CPU?"


def _tpot(answer: Answer) -> float:
    if answer.tpot_ms is None:
        raise RequestFailed("a measuring request gave a single token; there is no TPOT to measure")
    return answer.tpot_ms


async def seeds(endpoint: Endpoint) -> list[Seed]:
    """One short request a pool, one after the other. The very first also warms everything up and is not counted."""
    await endpoint.ask(Question(_REPEATS, pool=FAST, max_tokens=2, extra=_RUN_ON))
    found = []
    for pool in (FAST, GENERAL):
        answer = await endpoint.ask(Question(_REPEATS, pool=pool, max_tokens=24, extra=_RUN_ON))
        found.append(Seed(pool, answer.ttft_ms or 0.0, _tpot(answer)))
    return found


async def contrast(endpoint: Endpoint, requests: int = 4, tokens: int = 32) -> Contrast:
    """Fill the general pool; while all of its requests run, ask the fast one, again and again. Medians."""
    running = [asyncio.Event() for _ in range(requests)]
    jobs = [
        asyncio.create_task(endpoint.ask(Question(_REPEATS, pool=GENERAL, max_tokens=tokens, extra=_RUN_ON), event.set))
        for event in running
    ]
    try:
        for event, job in zip(running, jobs, strict=True):
            begun = asyncio.create_task(event.wait())
            await asyncio.wait([begun, job], return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
        fast: list[float] = []
        while not fast or not any(job.done() for job in jobs):
            answer = await endpoint.ask(Question(_REPEATS, pool=FAST, max_tokens=24, extra=_RUN_ON))
            if not fast or not any(job.done() for job in jobs):  # else it ran beside fewer of them
                fast.append(_tpot(answer))
        general = await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
    return Contrast(statistics.median(fast), statistics.median(_tpot(answer) for answer in general))
