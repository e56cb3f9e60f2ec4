"""``slo``, the default policy: the cheapest pool that attains the targets, and in it the fullest node that still does.

Filling nodes up instead of spreading requests keeps others empty, and on a batched engine only an empty node attains
a tight TPOT target (the idea is PolyServe's). A request without targets goes to the cheapest pool, the one with most
throughput for its price, and there to the emptiest node; to the fullest where others in the pool have targets, for the
same reason.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from pydantic import Field

from pdhub.api.plugin import PluginConfig
from pdhub.api.policy import Candidate, Decision, NodeView, Policy, PoolView, Prediction, Reason, Snapshot
from pdhub.api.request import RequestRecord, RequestView
from pdhub.policies.candidates import Candidates
from pdhub.policies.capable import sift
from pdhub.policies.draw import mix, seed_of, unit
from pdhub.policies.occupancy import busy, places
from pdhub.policies.reserve import Reserve

NAME = "slo"

Kept = Sequence[tuple[PoolView, NodeView]]


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
    leave: float = Field(
        0.5,
        gt=0,
        description="Shed a request of negative priority also where its first token would take more than this share of "
        "what the more demanding of the important requests ask for: nobody's place is taken away for them. Waiting in "
        "front of prefill instances does not count, for there they go first.",
    )
    important_ttft_ms: float | None = Field(
        None,
        gt=0,
        description="TTFT that important requests are taken to ask for until some came; default is that it is unknown.",
    )
    throughput: str | None = Field(
        None, description="Pool for requests without a target; default is the cheapest, then the one with most slots."
    )

    def check(self, pools: Sequence[str]) -> None:
        """Raises ValueError if a named pool does not exist."""
        if self.throughput is not None and self.throughput not in pools:
            raise ValueError(f"throughput names no pool: '{self.throughput}'")


ATTAINS, BARELY, UNKNOWN, SPOILS, MISSES = range(5)
"""How well a node would do, best first. ``BARELY`` attains with less room than the margin asks for; ``SPOILS`` attains,
but one more request would spoil the target of another one that runs there."""

_REASONS = (Reason.SLO_MET, Reason.SLO_MET, Reason.SLO_UNKNOWN, Reason.SLO_MET, Reason.SLO_LEAST_MISS)

LOST: Final = 1.1
"""A neighbour that is so far beyond its target cannot be saved by sending others elsewhere."""

_BEHIND = 1e9
"""Added to how full a node without a free place is: only a node with one is worth filling."""


Row = tuple[float, float, float, int, tuple[str, str], int, float, int]
"""One kept node: rank, cost, how full, tie, (pool, node), tier, ratio, busy. Rows sort from the left; the
names make every tie definite, so that nothing after them counts. A plain tuple: this is the time of a choice."""

_COST: Final = 1
_NAMES: Final = 4
_TIER: Final = 5


class Slo(Policy):
    """See the module. Chance comes from the request's id, so that a second look repeats the first."""

    def __init__(self, config: SloConfig) -> None:
        self._config = config
        self._reserve = Reserve(config.important_ttft_ms)

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
            reason = _REASONS[rows[0][_TIER]]
            explored = self._explored(request, rows, seed)
            if explored is not None:
                rows.insert(0, rows.pop(explored))
                reason = Reason.EXPLORE
        why = self._shed(request, snapshot, kept, rows[0], now) if request.priority < 0 else None
        return Decision(
            order=tuple([row[_NAMES] for row in rows]) if why is None else (),
            candidates=Candidates(lambda: [*_explained(rows, kept, request, snapshot, now, why), *dropped]),
            reason=reason if why is None else Reason.SHED,
            policy=NAME,
        )

    def observe(self, record: RequestRecord) -> None:
        self._reserve.observe(record)

    def _shed(self, request: RequestView, snapshot: Snapshot, kept: Kept, first: Row, now: float) -> str | None:
        """Why a request that may be shed is, though ``first`` could take it; None if it is not."""
        if not self._config.shed:
            return None
        if first[_TIER] == MISSES:
            return "would miss a target, and the request may be shed"
        if self._reserve.ttft_ms is None:
            return None
        pool, node = next((p, n) for p, n in kept if (p.name, n.name) == first[_NAMES])
        predicted, limit = (
            snapshot.latency.predict(request, pool, node, now),
            self._reserve.ttft_ms * self._config.leave,
        )
        if predicted.ttft_ms is None:
            return None
        # In front of prefill instances the important ones go first; what has a place in a pool keeps it from them.
        taken = predicted.ttft_ms - predicted.turn_ms
        if taken <= limit:
            return None
        return f"first token in {taken:.0f} ms; more important requests leave {limit:.0f} ms to those that may be shed"

    def _with_target(self, request: RequestView, snapshot: Snapshot, kept: Kept, now: float, seed: int) -> list[Row]:
        # Written out without calls: with a thousand nodes this loop is the time of a choice.
        predict, margin = snapshot.latency.predict, self._config.margin
        ttft, tpot = request.slo.ttft_ms or math.inf, request.slo.tpot_ms or math.inf
        wants_ttft, wants_tpot = request.slo.ttft_ms is not None, request.slo.tpot_ms is not None
        # A request that nobody stamped has not waited.
        waited = (now - request.arrived_s) * 1000 if request.arrived_s else 0.0
        sign = -1.0 if self._config.fill else 1.0
        rows: list[Row] = []
        for pool, node in kept:
            predicted = predict(request, pool, node, now)
            first, each = predicted.ttft_ms, predicted.tpot_ms
            ratio = 0.0 if each is None else each / tpot
            if first is not None and (late := (waited + first) / ttft) > ratio:
                ratio = late
            load, room = busy(node), node.slots or places(pool, node)
            full = load / room
            rank: float
            if ratio > 1:
                tier, rank = MISSES, MISSES + ratio
            elif (wants_ttft and first is None) or (wants_tpot and each is None):
                tier = rank = UNKNOWN
            elif node.tightest_tpot_ms is not None and _spoils(node, predicted):
                tier = rank = SPOILS
            else:
                tier = rank = ATTAINS if ratio <= margin else BARELY
                full *= sign
            if load >= room:
                full = _BEHIND + load / room
            rows.append((rank, pool.cost, full, mix(seed, node.name), (pool.name, node.name), tier, ratio, load))
        rows.sort()
        return rows

    def _without_target(self, request: RequestView, snapshot: Snapshot, kept: Kept, now: float, seed: int) -> list[Row]:
        predict, wanted = snapshot.latency.predict, self._config.throughput
        ranks = _ranks(snapshot, wanted)
        # Beside requests with targets they stay together: spread out they would leave no node empty enough for those.
        shared = {pool.name for pool, node in kept if node.tightest_tpot_ms is not None} if self._config.fill else set()
        rows: list[Row] = []
        for pool, node in kept:
            load, room = busy(node), node.slots or places(pool, node)
            full = load / room
            if load >= room:
                full += _BEHIND
            elif node.tightest_tpot_ms is not None and _spoils(node, predict(request, pool, node, now)):
                full += _BEHIND / 2
            elif pool.name in shared:
                full = -full
            rank, tie = ranks[pool.name], mix(seed, node.name)
            rows.append((rank, pool.cost, full, tie, (pool.name, node.name), ATTAINS, 0.0, load))
        rows.sort()
        return rows

    def _reason_without_target(self, request: RequestView, snapshot: Snapshot, first: Row) -> Reason:
        ranks = _ranks(snapshot, self._config.throughput)
        mine = [p.name for p in snapshot.pools if p.role == "decode" and request.model in p.models]
        return Reason.NO_SLO if first[_NAMES][0] == min(mine, key=ranks.__getitem__) else Reason.FALLBACK

    def _explored(self, request: RequestView, rows: Sequence[Row], seed: int) -> int | None:
        """Index of an unknown node that this request should try before the known ones. What is never tried stays
        unknown; important requests are not for trying."""
        if rows[0][_TIER] > BARELY or request.priority > 0 or unit(mix(seed, "explore")) >= self._config.explore:
            return None
        limit = rows[0][_COST]
        for index, (_, cost, full, _, _, tier, *_) in enumerate(rows):
            if tier == UNKNOWN and cost <= limit and full < _BEHIND:
                return index
        return None


def _ranks(snapshot: Snapshot, wanted: str | None) -> dict[str, float]:
    """Place of each pool for requests without a target: the wanted one, the cheapest, the one with most slots."""
    pools = sorted(snapshot.pools, key=lambda p: (p.name != wanted, p.cost, -p.capabilities.slots, p.name))
    return {pool.name: float(place) for place, pool in enumerate(pools)}


def _spoils(node: NodeView, predicted: Prediction) -> bool:
    """One more request would push a neighbour over its target: the prediction is for the node with this request on it,
    which is what its neighbours will see too. A target that is missed by far is lost already, and protects nobody."""
    limit = node.tightest_tpot_ms
    return limit is not None and predicted.tpot_ms is not None and limit < predicted.tpot_ms <= limit * LOST


def _explained(
    rows: Iterable[Row], kept: Kept, request: RequestView, snapshot: Snapshot, now: float, shed: str | None
) -> Iterator[Candidate]:
    """Predictions are made once more: a snapshot's latency model is frozen, and few decisions are ever explained."""
    views = {(pool.name, node.name): (pool, node) for pool, node in kept}
    for _, cost, _, _, names, tier, ratio, load in rows:
        predicted = snapshot.latency.predict(request, *views[names], now)
        scores = {"tier": float(tier), "used": ratio, "cost": cost, "busy": float(load)}
        by, why = (None, "") if shed is None else (NAME, shed)
        yield Candidate(*names, dropped_by=by, why=why, scores=scores, predicted=predicted)
