"""A frozen latency model: what policies see in a snapshot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pdhub.api.policy import NodeView, PoolView, Prediction
from pdhub.api.request import RequestView
from pdhub.core.latency_shape import Coefficients

GRACE_S: Final = 0.5
GRACE_TOKENS: Final = 8
"""A node that should have said something this long, and the time of so many tokens, ago is taken for stalled."""

PREFILL: Final = "(prefill)"
"""The name under which the prefill instances are learned, whatever a snapshot calls their pool."""

UNKNOWN: Final = Prediction()


@dataclass(frozen=True, slots=True)
class Factor:
    """What a node (or a pool) multiplies the pool's shape by, for one metric.

    Args:
        recent: lately; counts until ``recent_until``. base: in the long run; counts until ``base_until``.
    """

    recent: float = 1.0
    recent_until: float = -math.inf
    base: float = 1.0
    base_until: float = -math.inf


NO_FACTOR: Final = Factor()


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node.

    Args:
        due_s: when it should have given its next sign of life; infinite if it owes none.
    """

    ttft: Factor = NO_FACTOR
    tpot: Factor = NO_FACTOR
    due_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of one pool: learned coefficients, seeded ones (None = not seeded), and the pool's own factor."""

    learned: Coefficients = (0.0, 0.0, 0.0)
    seed: Coefficients | None = None
    pool: Factor = NO_FACTOR

    def older(self, u: float, v: float, node: Factor, now: float) -> float | None:
        """Milliseconds where the node's recent factor is stale; None = nothing that is not stale is known."""
        if now <= self.pool.recent_until:
            factor = self.pool.recent
            if now <= node.base_until and self.pool.base > 0:
                factor *= min(2.0, max(0.5, node.base / self.pool.base))
        elif now <= node.base_until:
            factor = node.base
        elif now <= self.pool.base_until:
            factor = self.pool.base
        else:
            seed = self.seed
            return None if seed is None else seed[0] + seed[1] * u + seed[2] * v
        c = self.learned
        return factor * (c[0] + c[1] * u + c[2] * v)


NO_LINE: Final = Line()


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One pool.

    Args:
        hit: part of what was sent before that is found in a prefix cache.
        uncached: part of a prompt that is not, as a rule; for prompts of which nothing is known.
        output_tokens: mean length of an answer; None = unknown.
    """

    ttft: Line = NO_LINE
    tpot: Line = NO_LINE
    hit: float = 0.0
    uncached: float = 1.0
    output_tokens: float | None = None


NO_NODE: Final = NodeRow()
NO_POOL: Final = PoolRow()


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """A :class:`~pdhub.api.policy.Predictor`.

    Args:
        nodes: by (pool, node).
        backlog_tokens: prompt tokens that wait at the prefill instance which the next request would get.
        turn_ms: until it would be sent there.
    """

    pools: Mapping[str, PoolRow] = field(default_factory=dict)
    nodes: Mapping[tuple[str, str], NodeRow] = field(default_factory=dict)
    backlog_tokens: int = 0
    turn_ms: float = 0.0

    def with_backlog(self, tokens: int, turn_ms: float = 0.0) -> LatencyTable:
        """The same knowledge, another backlog at the prefill instances and in front of them."""
        tokens = max(0, tokens)
        if (tokens, turn_ms) == (self.backlog_tokens, self.turn_ms):
            return self
        return replace(self, backlog_tokens=tokens, turn_ms=turn_ms)

    def uncached(self, request: RequestView) -> int:
        """Tokens of its prompt that a prefill instance has to compute, as far as one can tell; at least 1."""
        row, prompt, seen = self.pools.get(PREFILL, NO_POOL), request.prompt_tokens, request.seen_tokens
        fresh = prompt * row.uncached if seen is None else prompt - seen * row.hit
        return max(1, round(fresh))

    def predict(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> Prediction:
        """See :class:`~pdhub.api.policy.Predictor`."""
        name = PREFILL if pool.role == "prefill" else pool.name
        row = self.pools.get(name)
        if row is None:
            return UNKNOWN
        return self._predict(request, pool, row, node, self.nodes.get((name, node.name), NO_NODE), now)

    def predict_all(
        self, request: RequestView, pool: PoolView, nodes: Sequence[NodeView], now: float
    ) -> list[Prediction]:
        """:meth:`predict` for many nodes of one pool."""
        name = PREFILL if pool.role == "prefill" else pool.name
        row, known = self.pools.get(name), self.nodes
        if row is None:
            return [UNKNOWN] * len(nodes)
        return [self._predict(request, pool, row, n, known.get((name, n.name), NO_NODE), now) for n in nodes]

    def _predict(
        self, request: RequestView, pool: PoolView, row: PoolRow, node: NodeView, known: NodeRow, now: float
    ) -> Prediction:
        # The hottest code of a choice, once a candidate: what is known and fresh is read in place.
        ttft_factor, tpot_factor = known.ttft, known.tpot
        running, slots, load = node.in_flight, node.slots, node.load
        if load.running is not None:
            # The router's own count is newer, the engine's wider: other routers send there too.
            running = max(running, load.running + (load.waiting or 0))
        taken = running
        if slots and running >= slots:
            running = slots - 1
        prompt = request.prompt_tokens
        ttft: float | None
        tpot: float | None
        context = prompt + (row.output_tokens or 0.0) / 2
        if now <= tpot_factor.recent_until:
            c0, c1, c2 = row.tpot.learned
            tpot = tpot_factor.recent * (c0 + c1 * running + c2 * context)
        else:
            tpot = row.tpot.older(running, context, tpot_factor, now)
        served = pool.needs_prefill and pool.role == "decode"
        backlog = self.backlog_tokens if served else node.pending_tokens
        seen = request.seen_tokens
        fresh = prompt * row.uncached if seen is None else prompt - seen * row.hit
        if now <= ttft_factor.recent_until:
            c0, c1, c2 = row.ttft.learned
            ttft = ttft_factor.recent * (c0 + c1 * fresh + c2 * backlog)
        else:
            ttft = row.ttft.older(fresh, backlog, ttft_factor, now)
        turn = self.turn_ms if served else 0.0
        if ttft is not None:
            ttft += turn
        wait: float | None = 0.0
        if node.queued or (slots and taken >= slots):
            slot, queue = _waits(node, taken, len(pool.nodes), row, tpot)
            if slot is None or queue is None:
                wait = ttft = None
            else:
                wait = slot + queue
                if ttft is not None:
                    # A hosted node takes the next request's KV while it still decodes: the two waits overlap.
                    ttft = queue + (max(ttft, slot) if pool.needs_prefill else ttft + slot)
        late = now - known.due_s
        if late > GRACE_S and late * 1000 > GRACE_TOKENS * (tpot or 0.0):
            # It owes a token: whatever it was, it is at least that slow now.
            ttft = (ttft or 0.0) + late * 1000
            tpot = max(tpot or 0.0, late * 1000)
        return Prediction(ttft, tpot, wait, turn)


def _waits(
    node: NodeView, taken: int, nodes: int, row: PoolRow, tpot: float | None
) -> tuple[float | None, float | None]:
    """Milliseconds until a slot is free: because of those on the node, and because of those in the pool's queue."""
    if not node.slots:
        return 0.0, 0.0
    mean = row.output_tokens
    slot: float | None = 0.0
    before = taken - node.slots + 1
    if before > 0:
        left_each = mean and mean / 2
        if node.remaining_tokens is not None and node.in_flight:
            left_each = node.remaining_tokens / node.in_flight
        slot = None if left_each is None or tpot is None else before * left_each * tpot / node.slots
    if not node.queued:
        return slot, 0.0
    queue = None if mean is None or tpot is None else node.queued / max(1, nodes) * mean * tpot / node.slots
    return slot, queue
