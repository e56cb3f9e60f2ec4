"""``round_robin``: every node in turn, whatever it is good at. For comparison, and for nodes that are all alike."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from pdhub.api.plugin import PluginConfig
from pdhub.api.policy import Candidate, Decision, Policy, Reason, Snapshot
from pdhub.api.request import RequestRecord, RequestView
from pdhub.policies.candidates import Candidates
from pdhub.policies.capable import sift

NAME = "round_robin"

FORGOTTEN = 16
"""A node that ended nothing for so many rounds was away: it starts level with the others, not with their surplus."""

MAX_NODES = 65_536


class RoundRobinConfig(PluginConfig):
    """Options of ``round_robin``."""

    pools: list[str] = Field(
        default_factory=list, description="Pools that take turns, the rest is fallback; all if empty."
    )

    def check(self, pools: Sequence[str]) -> None:
        """Raises ValueError if a named pool does not exist."""
        for name in self.pools:
            if name not in pools:
                raise ValueError(f"pools names no pool: '{name}'")


class RoundRobin(Policy):
    """The node with the fewest requests so far is next: those that ended, counted here, and those in flight, counted
    in the snapshot. So choosing counts nothing, and two looks give the same turn."""

    def __init__(self, config: RoundRobinConfig) -> None:
        self._pools = frozenset(config.pools)
        self._ended: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._all = 0

    def choose(self, request: RequestView, snapshot: Snapshot, now: float, rng: random.Random) -> Decision:
        kept, dropped, nobody = sift(request, snapshot.pools)
        if not kept:
            return Decision((), Candidates(lambda: dropped), nobody, NAME)
        start = min((self._ended[n.name] for _, n in kept if n.name in self._ended), default=0)
        rows = sorted(
            (
                p.name not in self._pools if self._pools else False,
                self._ended.get(n.name, start) + n.in_flight,
                p.name,
                n.name,
            )
            for p, n in kept
        )
        return Decision(
            order=tuple((pool, node) for _, _, pool, node in rows),
            candidates=Candidates(
                lambda: [*(Candidate(p, n, scores={"turns": float(turns)}) for _, turns, p, n in rows), *dropped]
            ),
            reason=Reason.FALLBACK if rows[0][0] else Reason.ROUND_ROBIN,
            policy=NAME,
        )

    def observe(self, record: RequestRecord) -> None:
        for name in (record.node, record.prefill):
            if name is not None:
                self._count(name)

    def _count(self, name: str) -> None:
        self._all += 1
        if len(self._ended) >= MAX_NODES and name not in self._ended:
            oldest = min(self._last, key=self._last.__getitem__)
            del self._ended[oldest], self._last[oldest]
        away = self._all - self._last.get(name, self._all) > FORGOTTEN * len(self._ended)
        if name not in self._ended or away:
            others = [count for other, count in self._ended.items() if other != name]
            self._ended[name] = max(min(others, default=0), self._ended.get(name, 0))
        self._ended[name] += 1
        self._last[name] = self._all
