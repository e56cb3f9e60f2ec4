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
    """Whose turn it is follows from how many requests were sent so far: those that ended, counted here, and those in
    flight, counted in the snapshot. So choosing counts nothing, two looks give the same turn, and a node that comes
    (back) is not owed anything."""

    def __init__(self, config: RoundRobinConfig) -> None:
        self._pools = frozenset(config.pools)
        self._ended = {"decode": 0, "prefill": 0}

    def choose(self, request: RequestView, snapshot: Snapshot, now: float, rng: random.Random) -> Decision:
        kept, dropped, nobody = sift(request, snapshot.pools)
        if not kept:
            return Decision((), Candidates(lambda: dropped), nobody, NAME)
        sent = self._ended[kept[0][0].role] + sum(n.in_flight for p in snapshot.pools for n in p.nodes)
        mine = sorted((p.name, n.name) for p, n in kept if not self._pools or p.name in self._pools)
        others = sorted({(p.name, n.name) for p, n in kept}.difference(mine))
        order = (*_turned(mine, sent), *_turned(others, sent))
        return Decision(
            order=order,
            candidates=Candidates(
                lambda: [*(Candidate(p, n, scores={"turn": float(i)}) for i, (p, n) in enumerate(order)), *dropped]
            ),
            reason=Reason.ROUND_ROBIN if mine else Reason.FALLBACK,
            policy=NAME,
        )

    def observe(self, record: RequestRecord) -> None:
        self._ended["decode"] += record.node is not None
        self._ended["prefill"] += record.prefill is not None


def _turned(nodes: list[tuple[str, str]], sent: int) -> list[tuple[str, str]]:
    start = sent % len(nodes) if nodes else 0
    return nodes[start:] + nodes[:start]
