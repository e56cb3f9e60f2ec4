"""The frozen picture of all pools that policies see; only what changed is drawn again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pdhub.api.engine import EngineLoad
from pdhub.api.policy import NodeView, PoolView, Snapshot
from pdhub.core.latency import LatencyModel, LatencyTable
from pdhub.core.turns import Backlog

if TYPE_CHECKING:
    from pdhub.router.endpoint import Endpoint
    from pdhub.router.fleet import Pool

UNKNOWN_LOAD = EngineLoad()

PLACES = 64
"""So many places in the queues have a picture of their own at a time."""


class Picture:
    """Args:
    latency: learns from stays, frozen into every snapshot.
    load_stale_s: an engine's word about its load counts so long; then it is unknown, which is not idle.
    waiting: now: requests in each pool's queue.
    """

    def __init__(
        self,
        pools: Mapping[str, Pool],
        prefills: Mapping[str, Endpoint],
        latency: LatencyModel,
        load_stale_s: float,
        waiting: Callable[[], Mapping[str, int]],
    ) -> None:
        self._pools = pools
        self._prefills = prefills
        self._latency = latency
        self._load_stale_s = load_stale_s
        self._waiting = waiting
        self._version = 0
        self._snapshot: Snapshot | None = None
        self._places: dict[tuple[tuple[str, int], ...], Snapshot] = {}
        self._queued: Mapping[str, int] = {}
        self._table = self._drawn = LatencyTable()
        self._nodes: dict[str, NodeView] = {}
        self._views: dict[str, PoolView] = {}
        self._expiry: dict[str, float] = {}
        self._stale_at: float | None = None
        self._dirty: set[str] = set()
        self._moved: set[str] = set()
        self._all = True

    def changed(self, endpoints: Iterable[Endpoint]) -> None:
        """Something about them changed, or about everything if there is none."""
        names = [endpoint.name for endpoint in endpoints]
        self._dirty.update(names)
        self._all = self._all or not names
        self._snapshot = None

    def moved(self, endpoint: Endpoint) -> None:
        """Tokens came from it: seen in the next picture, but no reason for one."""
        self._moved.add(endpoint.name)

    def snapshot(
        self,
        now: float,
        inside: str | None = None,
        ahead: Mapping[str, int] | None = None,
        backlog: Backlog | None = None,
    ) -> Snapshot:
        """The current picture; the same object until something changes.

        Args:
            inside: a pool that has let the request in: those in its queue wait behind it.
            ahead: of those that wait in front of each pool, how many enter before the request; None = all.
            backlog: what the request would have in front of it at a prefill instance; None = what was sent there.
        """
        found = self._seen(now, inside, ahead)
        if backlog is None:
            return found
        table = self._drawn.with_backlog(backlog.tokens, backlog.wait_ms)
        return found if table is self._drawn else replace(found, latency=table)

    def _seen(self, now: float, inside: str | None, ahead: Mapping[str, int] | None) -> Snapshot:
        table, queued = self._latency.freeze(now), self._waiting()
        late = self._stale_at is not None and now >= self._stale_at
        if self._snapshot is None or late or table is not self._table or queued != self._queued:
            if late:
                self._dirty.update(name for name, at in self._expiry.items() if now >= at)
            if table is not self._table:
                self._dirty |= self._moved
                self._moved.clear()
            self._table, self._queued = table, queued
            self._snapshot = self._draw(now)
            self._places.clear()
        if not any(queued.values()):
            return self._snapshot
        seen = {pool: 0 if pool == inside else count for pool, count in (ahead or queued).items()}
        other = tuple((pool, seen.get(pool, count)) for pool, count in queued.items() if seen.get(pool, count) != count)
        if not other:
            return self._snapshot
        if other not in self._places:
            if len(self._places) >= PLACES:
                self._places.clear()
            self._places[other] = _with_queues(self._snapshot, dict(other))
        return self._places[other]

    def _draw(self, now: float) -> Snapshot:
        for pool in self._pools.values():
            self._draw_pool(pool, now)
        backlogs = [p.pending_tokens for p in self._prefills.values() if p.usable(now)]
        changes = [p.breaker.next_change(now) for p in self._prefills.values()]
        changes.append(min(self._expiry.values(), default=None))
        self._stale_at = min((c for c in changes if c is not None), default=None)
        self._all = False
        self._dirty.clear()
        self._version += 1
        self._drawn = self._table.with_backlog(min(backlogs, default=0))
        return Snapshot(self._version, tuple(self._views[name] for name in self._pools), self._drawn)

    def _draw_pool(self, pool: Pool, now: float) -> None:
        waiting = self._queued.get(pool.name, 0)
        old = self._views.get(pool.name)
        everything = self._all or old is None or any(n.queued != waiting for n in old.nodes[:1])
        touched = everything
        for node in pool.nodes.values():
            if everything or node.name in self._dirty:
                self._nodes[node.name] = self._draw_node(pool, node, waiting, now)
                touched = True
        if touched:
            self._views[pool.name] = PoolView(
                name=pool.name,
                models=pool.models,
                capabilities=pool.capabilities,
                nodes=tuple([self._nodes[name] for name in pool.nodes]),
                cost=pool.cost,
                needs_prefill=pool.needs_prefill,
                labels=pool.labels,
            )

    def _draw_node(self, pool: Pool, node: Endpoint, waiting: int, now: float) -> NodeView:
        expiries = [node.breaker.next_change(now)]
        load = node.load
        if load is not UNKNOWN_LOAD:
            if now < node.load_at + self._load_stale_s:
                expiries.append(node.load_at + self._load_stale_s)
            else:
                load = UNKNOWN_LOAD
        known = [at for at in expiries if at is not None]
        if known:
            self._expiry[node.name] = min(known)
        else:
            self._expiry.pop(node.name, None)
        left = [stay.remaining() for stay in node.stays.values()]
        targets = [t for stay in node.stays.values() if (t := stay.tpot_target_ms) is not None]
        return NodeView(
            name=node.name,
            pool=pool.name,
            health=node.health(now),
            in_flight=node.in_flight,
            queued=waiting,
            load=load,
            labels=node.labels,
            slots=node.slots,
            pending_tokens=node.pending_tokens,
            remaining_tokens=None if None in left else round(sum(x for x in left if x is not None)),
            tightest_tpot_ms=min(targets, default=None),
        )


def _with_queues(snapshot: Snapshot, queued: Mapping[str, int]) -> Snapshot:
    pools = [
        replace(pool, nodes=tuple([replace(node, queued=queued[pool.name]) for node in pool.nodes]))
        if pool.name in queued
        else pool
        for pool in snapshot.pools
    ]
    return replace(snapshot, pools=tuple(pools))
