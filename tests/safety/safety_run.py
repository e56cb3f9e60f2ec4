"""Many trials in several trees at once, and what they add up to."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safety_board import Count
from safety_trials import Result, Trial, seed_of
from safety_world import World


class Run:
    """Args:
    trials: of each state that found it, on each transport. base: seed of everything. first: number of the first.
    trees: at once, of each transport. told: called after each trial.
    """

    def __init__(
        self,
        transports: Sequence[str],
        states: Sequence[str],
        trials: int,
        *,
        base: int = 1,
        first: int = 0,
        trees: int = 1,
        told: Callable[[Result], None] = lambda result: None,
    ) -> None:
        self._transports, self._states, self._trials = transports, states, trials
        self._base, self._first, self._trees, self._told = base, first, trees, told
        self.results: dict[tuple[str, str], list[Result]] = {}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self) -> None:
        """All of them. What went wrong is in :attr:`wrong`, each with the seed of its trial."""
        work = {transport: self._work(transport) for transport in self._transports}
        await asyncio.gather(
            *(self._tree(transport, work[transport]) for transport in work for _ in range(self._trees))
        )

    def _work(self, transport: str) -> Iterator[tuple[str, int]]:
        """The next trial: of each state in turn, until each has enough."""
        number = dict.fromkeys(self._states, self._first)
        found = {state: self.results.setdefault((transport, state), []) for state in self._states}
        while True:
            lacking = [s for s in self._states if sum(r.held > 0 for r in found[s]) < self._trials]
            if not lacking:
                return
            for state in lacking:
                number[state] += 1
                yield state, number[state] - 1

    async def _tree(self, transport: str, work: Iterator[tuple[str, int]]) -> None:
        directory = Path(tempfile.mkdtemp(prefix="pdhub-safety-"))
        world = World(transport, directory)
        await world.open()
        well = True
        for state, number in work:
            result = await Trial(world, state, seed_of(self._base, transport, state, number)).run()
            self.results[transport, state].append(result)
            self._told(result)
            if result.wrong:
                well = False
                self.wrong += [f"{result.seed}, {state}, {result.fault}: {wrong}" for wrong in result.wrong]
                await world.close()
                await world.open()
        codes = await world.close()
        if any(codes):
            self.wrong.append(f"{transport}: exit statuses {codes}")
        self.wrong += [f"{transport}, at the end: {wrong}" for wrong in world.board.complaints()]
        self.counts.update({count.name.lower(): world.board.counted(count) for count in Count})
        if well:
            shutil.rmtree(directory)

    def table(self) -> dict[str, Any]:
        """By state and transport, for JSON."""
        out: dict[str, Any] = {}
        for (transport, state), results in self.results.items():
            there = [result for result in results if result.held]
            idle = sorted(result.idle_s for result in there)
            out.setdefault(state, {})[transport] = {
                "trials": len(there),
                "did_not_find_their_state": len(results) - len(there),
                "leases_in_the_state": sum(result.held for result in there),
                "faults": dict(sorted(Counter(result.fault for result in there).items())),
                "requests": dict(sorted(Counter(o.partition(":")[0] for r in there for o in r.outcomes).items())),
                "idle_after_s": {
                    "median": round(statistics.median(idle), 2) if idle else None,
                    "longest": round(idle[-1], 2) if idle else None,
                },
                "wrong": sum(bool(result.wrong) for result in results),
            }
        return out
