"""A request in front of the pools' doors: which one it waits at, when it looks again, when it is told.

Sans-IO, for the router and the lab alike: what a door says, and the clock, are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pdhub.api.policy import NodeView, PoolView, Prediction, Snapshot
from pdhub.api.request import RequestView
from pdhub.core.spill import Door, Way, choose_door

AT_ONCE_S: Final = 0.001
"""A target may be shorter than parsing took; with a free place there is nothing to wait for."""

TELL_S: Final = 0.02
TELL_SHARE: Final = 0.05
"""A request that cannot be served in time is told a little before that time is over: so many seconds, or that share
of all it has."""

LOOK_S: Final = (0.05, 1.0)
LOOK_SHARE: Final = 0.25
"""Who waits looks again after a quarter of what is left, within these bounds: seldom while there is time, soon when
there is not."""

NODES: Final = 8
"""So many nodes of a pool, in the policy's order, are asked what they would do: it starts with the best."""

MOVES: Final = 8
"""After so many moves from door to door a request stays where it is."""


def told_at(arrived: float, deadline: float, now: float) -> float:
    """When a request that still waits is refused. Times are seconds of one clock; ``deadline``: its first token is
    due."""
    return max(deadline - min(TELL_S, TELL_SHARE * (deadline - arrived)), now + AT_ONCE_S)


def look_at(deadline: float, now: float) -> float:
    """When one that waits should look for another door."""
    least, most = LOOK_S
    return now + min(most, max(least, LOOK_SHARE * (deadline - now)))


def find_door(
    request: RequestView,
    nodes: Sequence[tuple[str, str]],
    snapshot: Snapshot,
    deadline: float,
    now: float,
    *,
    opens: Callable[[str], bool],
    wait_s: Callable[[str], float | None],
    inside: str | None = None,
) -> Way:
    """The pool to wait at.

    Args:
        nodes: those that may serve it, as (pool, node), in the policy's order; at least one.
        snapshot: in which only those wait in front of a pool that enter before this request.
        opens: whether a pool would let it in or let it wait.
        wait_s: how long it would wait there, from how fast places became free; None = unknown.
        inside: the pool in which it has a place.
    """
    pools: dict[str, list[str]] = {}
    for pool, node in nodes:
        pools.setdefault(pool, []).append(node)
    views = {view.name: view for view in snapshot.pools}
    left_ms, target = (deadline - now) * 1000, request.slo.tpot_ms
    doors: list[Door] = []
    for pool, names in pools.items():
        seen = _predictions(request, snapshot, views[pool], names[:NODES], now)
        best = min(seen, key=lambda p: (_misses(p, left_ms, target), p.ttft_ms is not None, p.ttft_ms or 0.0))
        ttft = best.ttft_ms
        if ttft is None and pool != inside:
            wait = wait_s(pool)
            ttft = None if not wait else wait * 1000
        doors.append(Door(pool, pool == inside or opens(pool), ttft, best.tpot_ms))
        if len(doors) == 1 and inside is None:  # as a rule the first will do, and nobody else is asked
            way = choose_door(doors, request.slo, left_ms)
            if way.in_time:
                return way
    return choose_door(doors, request.slo, left_ms, inside)


def _predictions(
    request: RequestView, snapshot: Snapshot, pool: PoolView, names: Sequence[str], now: float
) -> list[Prediction]:
    wanted: Mapping[str, NodeView] = {node.name: node for node in pool.nodes}
    return [snapshot.latency.predict(request, pool, wanted[name], now) for name in names]


def _misses(seen: Prediction, left_ms: float, target: float | None) -> int:
    """How many targets it would miss."""
    late = seen.ttft_ms is not None and seen.ttft_ms > left_ms
    return late + (target is not None and seen.tpot_ms is not None and seen.tpot_ms > target)
