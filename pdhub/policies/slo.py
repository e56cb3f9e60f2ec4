"""``slo``, the default policy: the cheapest pool that attains the targets, and in it the fullest node that still does.

Filling nodes up instead of spreading requests keeps others empty, and on a batched engine only an empty node attains
a tight TPOT target (the idea is PolyServe's). A request without targets goes to the cheapest pool, the one with most
throughput for its price, and there to the emptiest node.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from pydantic import Field

from pdhub.api.plugin import PluginConfig
from pdhub.api.policy import Candidate, Decision, NodeView, Policy, PoolView, Prediction, Reason, Snapshot
from pdhub.api.request import RequestView
from pdhub.policies.candidates import Candidates
from pdhub.policies.capable import sift
from pdhub.policies.draw import mix, seed_of, unit
from pdhub.policies.occupancy import busy, places

NAME = "slo"


class SloConfig(PluginConfig):
    """Options of ``slo``."""

    margin: float = Field(
        0.9, gt=0, le=1, description="Share of a target that a prediction may use up and still attain it safely."
    )
    explore: float = Field(
        0.03,
        ge=0,
        le=1,
        description="Share of requests that try a node of which nothing is known, if it costs no more.",
    )
    fill: bool = Field(True, description="Fill the fullest node that still attains; false spreads requests evenly.")
    shed: bool = Field(True, description="Refuse a request of negative priority that no node would serve in time.")
    throughput: str | None = Field(
        None, description="Pool for requests without a target; default is the cheapest, then the one with most slots."
    )

    def check(self, pools: Sequence[str]) -> None:
        """Raises ValueError if a named pool does not exist."""
        if self.throughput is not None and self.throughput not in pools:
            raise ValueError(f"throughput names no pool: '{self.throughput}'")


class Tier(IntEnum):
    """How well a node would do, best first."""

    ATTAINS = 0
    #: attains, but with less room than the margin asks for
    BARELY = 1
    UNKNOWN = 2
    #: attains, but one more request would spoil the target of another one that runs there
    SPOILS = 3
    MISSES = 4


class Row(NamedTuple):
    """One kept node; sorts by ``key``, in which its name makes every tie definite."""

    key: tuple[float | str, ...]
    tier: Tier
    ratio: float
    pool: PoolView
    node: NodeView
    predicted: Prediction


class Slo(Policy):
    """See the module. Chance comes from the request's id, so that a second look repeats the first."""

    def __init__(self, config: SloConfig) -> None:
        self._config = config

    def choose(self, request: RequestView, snapshot: Snapshot, now: float, rng: random.Random) -> Decision:
        kept, dropped, nobody = sift(request, snapshot.pools)
        if not kept:
            return Decision((), Candidates(lambda: dropped), nobody, NAME)
        slo, seed = request.slo, seed_of(request.id)
        if slo.ttft_ms is None and slo.tpot_ms is None:
            rows = self._without_target(request, snapshot, kept, now, seed)
            reason = self._reason_without_target(request, snapshot, rows[0])
        else:
            rows = self._with_target(request, snapshot, kept, now, seed)
            reason = _REASONS[rows[0].tier]
            if rows[0].tier is Tier.MISSES and self._config.shed and request.priority < 0:
                shed = [_shed(row) for row in rows]
                return Decision((), Candidates(lambda: [*shed, *dropped]), Reason.SHED, NAME)
            explored = self._explored(request, rows, seed)
            if explored is not None:
                rows.insert(0, rows.pop(explored))
                reason = Reason.EXPLORE
        order = tuple([(row.pool.name, row.node.name) for row in rows])
        return Decision(order, Candidates(lambda: [*_explained(rows), *dropped]), reason, NAME)

    def _with_target(
        self,
        request: RequestView,
        snapshot: Snapshot,
        kept: Sequence[tuple[PoolView, NodeView]],
        now: float,
        seed: int,
    ) -> list[Row]:
        predict, margin = snapshot.latency.predict, self._config.margin
        ttft, tpot = request.slo.ttft_ms, request.slo.tpot_ms
        # A request that nobody stamped has not waited.
        waited = (now - request.arrived_s) * 1000 if request.arrived_s else 0.0
        fill = -1.0 if self._config.fill else 1.0
        rows = []
        for pool, node in kept:
            predicted = predict(request, pool, node, now)
            ratio, known = 0.0, True
            if tpot is not None:
                if predicted.tpot_ms is None:
                    known = False
                else:
                    ratio = predicted.tpot_ms / tpot
            if ttft is not None:
                if predicted.ttft_ms is None:
                    known = False
                else:
                    ratio = max(ratio, (waited + predicted.ttft_ms) / ttft)
            room = places(pool, node)
            load = busy(node)
            full = load / room
            if ratio > 1:
                tier = Tier.MISSES
            elif not known:
                tier = Tier.UNKNOWN
            elif _spoils(node, predicted):
                tier = Tier.SPOILS
            else:
                tier = Tier.ATTAINS if ratio <= margin else Tier.BARELY
            # Only a node with a free place is filled; behind a queue, the shortest one.
            good = tier <= Tier.BARELY
            key = (
                float(tier),
                ratio if tier is Tier.MISSES else 0.0,
                pool.cost,
                float(load >= room),
                full * fill if good and load < room else full,
                float(mix(seed, node.name)),
                pool.name,
                node.name,
            )
            rows.append(Row(key, tier, ratio, pool, node, predicted))
        rows.sort()
        return rows

    def _without_target(
        self,
        request: RequestView,
        snapshot: Snapshot,
        kept: Sequence[tuple[PoolView, NodeView]],
        now: float,
        seed: int,
    ) -> list[Row]:
        predict, wanted = snapshot.latency.predict, self._config.throughput
        rows = []
        for pool, node in kept:
            predicted = predict(request, pool, node, now)
            room, load = places(pool, node), busy(node)
            key = (
                float(wanted is not None and pool.name != wanted),
                pool.cost,
                float(-pool.capabilities.slots),
                pool.name,
                float(load >= room),
                float(_spoils(node, predicted)),
                load / room,
                float(mix(seed, node.name)),
                node.name,
            )
            rows.append(Row(key, Tier.ATTAINS, 0.0, pool, node, predicted))
        rows.sort()
        return rows

    def _reason_without_target(self, request: RequestView, snapshot: Snapshot, first: Row) -> Reason:
        wanted = self._config.throughput
        if wanted is None:
            mine = [p for p in snapshot.pools if p.role == "decode" and request.model in p.models]
            wanted = min(mine, key=lambda p: (p.cost, -p.capabilities.slots, p.name)).name
        return Reason.NO_SLO if first.pool.name == wanted else Reason.FALLBACK

    def _explored(self, request: RequestView, rows: Sequence[Row], seed: int) -> int | None:
        """Index of an unknown node that this request should try before the known ones. What is never tried stays
        unknown; important requests are not for trying."""
        if rows[0].tier > Tier.BARELY or request.priority > 0 or unit(mix(seed, "explore")) >= self._config.explore:
            return None
        limit = rows[0].pool.cost
        for index, row in enumerate(rows):
            if row.tier is Tier.UNKNOWN and row.pool.cost <= limit and row.key[3] == 0.0:
                return index
        return None


_REASONS = {
    Tier.ATTAINS: Reason.SLO_MET,
    Tier.BARELY: Reason.SLO_MET,
    Tier.UNKNOWN: Reason.SLO_UNKNOWN,
    Tier.SPOILS: Reason.SLO_MET,
    Tier.MISSES: Reason.SLO_LEAST_MISS,
}


def _spoils(node: NodeView, predicted: Prediction) -> bool:
    """The prediction is for the node with this request on it, which is what its neighbours will see too."""
    limit = node.tightest_tpot_ms
    return limit is not None and predicted.tpot_ms is not None and predicted.tpot_ms > limit


def _explained(rows: Sequence[Row]) -> Iterator[Candidate]:
    for row in rows:
        scores = {"tier": float(row.tier), "used": row.ratio, "cost": row.pool.cost, "busy": float(busy(row.node))}
        yield Candidate(row.pool.name, row.node.name, scores=scores, predicted=row.predicted)


def _shed(row: Row) -> Candidate:
    why = f"would take {row.ratio:.2f} of the target, and the request may be shed"
    return Candidate(row.pool.name, row.node.name, dropped_by=NAME, why=why, predicted=row.predicted)
