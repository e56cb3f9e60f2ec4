"""``slo_threshold``: a TPOT target below a threshold goes to the fast pool, everything else to the other."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from pdhub.api.plugin import PluginConfig
from pdhub.api.policy import Candidate, Decision, NodeView, Policy, PoolView, Reason, Snapshot
from pdhub.api.request import RequestView
from pdhub.policies.capable import sift

NAME = "slo_threshold"


class SloThresholdConfig(PluginConfig):
    """Options of ``slo_threshold``."""

    tpot_below_ms: float = Field(gt=0, description="A TPOT target below this many milliseconds takes the fast pool.")
    fast: str = Field(description="Pool for tight TPOT targets.")
    otherwise: str = Field(description="Pool for everything else.")

    def check(self, pools: Sequence[str]) -> None:
        """Raises ValueError if a named pool does not exist."""
        for option in ("fast", "otherwise"):
            if getattr(self, option) not in pools:
                raise ValueError(f"{option} names no pool: '{getattr(self, option)}'")


class SloThreshold(Policy):
    """Within a pool the node with the fewest requests in flight, then by name. Nodes of other pools follow as
    fallback: a request is better served late than refused while somebody can serve it."""

    def __init__(self, config: SloThresholdConfig) -> None:
        self._config = config

    def choose(self, request: RequestView, snapshot: Snapshot, now: float, rng: random.Random) -> Decision:
        kept, dropped, nobody = sift(request, snapshot.pools)
        tight = request.slo.tpot_ms is not None and request.slo.tpot_ms < self._config.tpot_below_ms
        wanted = self._config.fast if tight else self._config.otherwise
        kept.sort(key=lambda item: _rank(item, wanted))
        candidates = [Candidate(p.name, n.name, scores={"in_flight": float(n.in_flight)}) for p, n in kept]
        return Decision(
            order=tuple((pool.name, node.name) for pool, node in kept),
            candidates=tuple(sorted(candidates + dropped, key=lambda c: (c.pool, c.node))),
            reason=self._reason(request, kept[0][0].name, wanted, tight) if kept else nobody,
            policy=NAME,
        )

    def _reason(self, request: RequestView, pool: str, wanted: str, tight: bool) -> Reason:
        if pool != wanted:
            return Reason.FALLBACK
        if tight:
            return Reason.TPOT_BELOW_THRESHOLD
        return Reason.NO_SLO if request.slo.tpot_ms is None else Reason.RULE


def _rank(item: tuple[PoolView, NodeView], wanted: str) -> tuple[bool, str, int, str]:
    pool, node = item
    return pool.name != wanted, pool.name, node.in_flight + node.queued, node.name
