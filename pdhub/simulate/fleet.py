"""What the simulated router knows of its nodes and prefill instances, and the frozen picture that policies see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pdhub.api.engine import Capabilities
from pdhub.api.policy import NodeView, PoolView, Predictor, Snapshot
from pdhub.api.request import Feature
from pdhub.core.admission import AdmissionQueue, Ticket
from pdhub.core.latency import PREFILL, LatencyModel
from pdhub.core.turns import Ahead, TurnQueue
from pdhub.simulate.engine import Node, Prefill, Running
from pdhub.simulate.workload import Arrival

ALL = frozenset(Feature)
ANYTHING = Capabilities(ALL, 1 << 31, 1000)


class NodeState:
    """One decode node as the router sees it.

    Args:
        targets: how many requests on it have which TPOT target.
        coming: requests that were sent to it and are not ready to decode, by id, and about when they will be.
        mark_s, mark_steps, mark_area: when TPOT was last learned from what runs there.
    """

    __slots__ = (
        "_area", "_counted_s", "coming", "engine", "in_flight", "labels", "mark_area", "mark_s", "mark_steps", "name",
        "pending_tokens", "places", "pool", "targets", "view",
    )  # fmt: skip

    def __init__(self, engine: Node, pool: str, labels: dict[str, str]) -> None:
        self.engine = engine
        self.name = engine.name
        self.pool = pool
        self.labels = labels
        self.places = engine.cost.places
        self.in_flight = 0
        self.pending_tokens = 0
        self.targets: dict[float, int] = {}
        self.coming: dict[str, tuple[float, Arrival]] = {}
        self.mark_s = self.mark_steps = self.mark_area = 0.0
        self.view: NodeView | None = None
        self._area = 0.0
        self._counted_s = 0.0

    def area(self, now: float) -> float:
        """Requests on it times seconds, since the run began."""
        return self._area + self.in_flight * (now - self._counted_s)

    def enter(self, tpot_ms: float | None, now: float) -> None:
        self._count(1, now)
        if tpot_ms is not None:
            self.targets[tpot_ms] = self.targets.get(tpot_ms, 0) + 1

    def leave(self, tpot_ms: float | None, now: float) -> None:
        self._count(-1, now)
        if tpot_ms is not None:
            self.targets[tpot_ms] -= 1
            if not self.targets[tpot_ms]:
                del self.targets[tpot_ms]

    def _count(self, change: int, now: float) -> None:
        self._area = self.area(now)
        self._counted_s = now
        self.in_flight += change
        self.view = None


class PoolState:
    """One pool and its door."""

    __slots__ = (
        "capabilities",
        "cost",
        "door",
        "labels",
        "models",
        "name",
        "needs_prefill",
        "nodes",
        "view",
    )

    def __init__(
        self,
        name: str,
        nodes: Sequence[NodeState],
        *,
        models: frozenset[str],
        cost: float,
        labels: dict[str, str],
        needs_prefill: bool,
        limit: int,
    ) -> None:
        self.name = name
        self.nodes = {node.name: node for node in nodes}
        self.models = models
        self.cost = cost
        self.labels = labels
        self.needs_prefill = needs_prefill
        self.door = AdmissionQueue(limit=limit, capacity=sum(node.places for node in nodes))
        self.view: PoolView | None = None
        first = nodes[0].engine.cost
        self.capabilities = Capabilities(ALL, first.max_context, 1000, sum(n.engine.cost.slots for n in nodes))


class Picture:
    """Makes snapshots; views of what did not change are used again. ``truth``: instead of the latency model.
    ``weighed``: the ticket that the last one was for.

    Args:
        ahead: how much prefill instances are sent before they have answered.
    """

    def __init__(
        self, pools: Iterable[PoolState], prefills: Sequence[Prefill], latency: LatencyModel, ahead: Ahead
    ) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self.prefills = {p.name: p for p in prefills}
        self.backlog = {p.name: 0 for p in prefills}
        self.prefill_in_flight = {p.name: 0 for p in prefills}
        self.lines = {p.name: TurnQueue(ahead) for p in prefills}
        self.truth: Predictor | None = None
        self.weighed: Ticket | None = None
        self._latency = latency
        self._version = 0

    def decode(self, now: float, ticket: Ticket, weighed: Ticket, inside: str | None = None) -> Snapshot:
        """What the policy sees for one request: in front of a pool only those wait that enter before it.

        Args:
            weighed: its ticket in front of prefill instances.
            inside: the pool in which it has a place.
        """
        self._version += 1
        self.weighed = weighed
        views = []
        for pool in self.pools.values():
            view = self._pool(pool)
            if pool.door.waiting and pool.name != inside and (ahead := pool.door.ahead(ticket)):
                view = replace(view, nodes=tuple([replace(node, queued=ahead) for node in view.nodes]))
            views.append(view)
        return Snapshot(self._version, tuple(views), self._predictor(now, weighed))

    def prefill(self, models: frozenset[str], now: float, weighed: Ticket) -> Snapshot:
        """What the choice of a prefill instance sees: the work that each has before this request."""
        self._version += 1
        nodes = tuple(
            NodeView(
                name,
                PREFILL,
                in_flight=self.prefill_in_flight[name],
                pending_tokens=self.backlog[name] + self.lines[name].ahead(weighed),
            )
            for name in self.prefills
        )
        pool = PoolView(PREFILL, models, ANYTHING, nodes, role="prefill", needs_prefill=False)
        latency: Predictor = self._latency.freeze(now)
        return Snapshot(self._version, (pool,), latency)

    def _predictor(self, now: float, weighed: Ticket) -> Predictor:
        if self.truth is not None:
            return self.truth
        table = self._latency.freeze(now)
        if not self.lines:
            return table
        least = min(line.backlog(weighed, self.backlog[name], now) for name, line in self.lines.items())
        return table.with_backlog(least.tokens, least.wait_ms)

    def _pool(self, pool: PoolState) -> PoolView:
        fresh = False
        for node in pool.nodes.values():
            if node.view is None or node.in_flight >= node.engine.cost.slots:
                node.view = self._node(pool, node)
                fresh = True
        if fresh or pool.view is None:
            pool.view = PoolView(
                name=pool.name,
                models=pool.models,
                capabilities=pool.capabilities,
                nodes=tuple([node.view for node in pool.nodes.values() if node.view is not None]),
                cost=pool.cost,
                needs_prefill=pool.needs_prefill,
                labels=pool.labels,
            )
        return pool.view

    def _node(self, pool: PoolState, node: NodeState) -> NodeView:
        slots = node.engine.cost.slots
        return NodeView(
            name=node.name,
            pool=pool.name,
            in_flight=node.in_flight,
            labels=node.labels,
            slots=slots,
            pending_tokens=node.pending_tokens,
            remaining_tokens=self._remaining(pool.name, node) if node.in_flight >= slots else None,
            tightest_tpot_ms=min(node.targets, default=None),
        )

    def _remaining(self, pool: str, node: NodeState) -> int | None:
        """What the running requests are expected to add; those that have no slot yet count as whole answers."""
        total = 0.0
        running: list[Running] = node.engine.running
        for run in running:
            left = self._latency.remaining(pool, node.engine.produced(run))
            if left is None:
                return None
            total += left
        if node.in_flight > len(running):
            whole = self._latency.remaining(pool, 0)
            if whole is None:
                return None
            total += whole * (node.in_flight - len(running))
        return round(total)
