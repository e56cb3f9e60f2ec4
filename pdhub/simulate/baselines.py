"""What a policy has to beat: the simple things that people do today."""

from __future__ import annotations

import random

from pdhub.api.policy import Candidate, Decision, NodeView, Policy, PoolView, Reason, Snapshot
from pdhub.api.request import RequestView
from pdhub.config.models import Config
from pdhub.policies.capable import sift
from pdhub.policies.occupancy import busy, fullness, places
from pdhub.policies.round_robin import RoundRobin, RoundRobinConfig
from pdhub.policies.slo_threshold import SloThreshold, SloThresholdConfig
from pdhub.simulate.lab import Contender

THRESHOLD_MS = 25.0
"""Between MLPerf's interactive targets for large models (15 and 20 ms) and its server targets (80 ms)."""


class Only(Policy):
    """Everything to one pool, there to the emptiest node; with ``spill``: to the others while every node is full."""

    def __init__(self, pool: str, *, spill: bool) -> None:
        self._pool = pool
        self._spill = spill

    def choose(self, request: RequestView, snapshot: Snapshot, now: float, rng: random.Random) -> Decision:
        kept, dropped, nobody = sift(request, snapshot.pools)
        mine = [(p, n) for p, n in kept if p.name == self._pool]
        others = [(p, n) for p, n in kept if p.name != self._pool]
        full = all(busy(n) >= places(p, n) for p, n in mine)
        first, then = (others, mine) if self._spill and full and others else (mine, others)
        order = sorted(first, key=_rank) + (sorted(then, key=_rank) if self._spill else [])
        left = [] if self._spill else [Candidate(p.name, n.name, dropped_by="only") for p, n in others]
        return Decision(
            order=tuple((p.name, n.name) for p, n in order),
            candidates=(*(Candidate(p.name, n.name) for p, n in order), *left, *dropped),
            reason=(Reason.RULE if first is mine else Reason.SPILL) if order else nobody,
            policy="only",
        )


def _rank(item: tuple[PoolView, NodeView]) -> tuple[float, str]:
    return fullness(*item), item[1].name


def baselines(config: Config, threshold_ms: float = THRESHOLD_MS) -> list[Contender]:
    """(a) everything to the cheapest pool, (b) everything to the dearest with spill on full, (c) a static TPOT
    threshold between them, (d) round robin. With bounded queues, but without spill before a target is lost."""
    pools = sorted(config.pools, key=lambda p: p.cost)
    cheap, dear = pools[0].name, pools[-1].name
    threshold = SloThresholdConfig(tpot_below_ms=threshold_ms, fast=dear, otherwise=cheap)
    return [
        Contender("throughput-only", lambda scene: Only(cheap, spill=False), plain=True),
        Contender("fast-then-spill", lambda scene: Only(dear, spill=True), plain=True),
        Contender("tpot-threshold", lambda scene: SloThreshold(threshold), plain=True),
        Contender("round-robin", lambda scene: RoundRobin(RoundRobinConfig()), plain=True),
    ]
