"""The latency model: what a request would see on each node, seeded by the configuration and learned from outcomes.

::

    model = LatencyModel({"fast": PoolSeed(ttft_ms=80, tpot_ms=4)})
    model.observe(Sample("fast", "fast-0", at_s=now, ttft_ms=95.0, prompt_tokens=812))
    model.freeze(now).predict(request, pool, node, now)     # -> Prediction

Per pool a *shape*: TTFT over (uncached prompt tokens, tokens ahead at prefill), TPOT over (other running requests,
context). Per node a *level*: how much slower or faster than the shape, followed within a few observations. Knowledge
that grew stale gives way to wider and older knowledge: node, pool, long run, seed, unknown. Waiting for a slot is not
learned but counted, from what runs there.

Sans-IO: every time is passed in. One instance for all pools; memory is bounded by the number of nodes, and by the
digests of prompts that it remembers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeGuard

from pdhub.core.latency_errors import Calibration, Errors
from pdhub.core.latency_lengths import Lengths
from pdhub.core.latency_level import Level
from pdhub.core.latency_prefixes import Prefixes
from pdhub.core.latency_sample import PoolSeed, Sample, Tuning
from pdhub.core.latency_shape import SETTLED, Shape
from pdhub.core.latency_table import NO_NODE, PREFILL, Factor, LatencyTable, Line, NodeRow, PoolRow

__all__ = ["PREFILL", "Calibration", "LatencyModel", "LatencyTable", "Metric", "PoolSeed", "Sample", "Tuning"]

Metric = Literal["ttft", "tpot"]

LEAST_MS: Final = 1e-3
MOST_MS: Final = 1e8
LEAST_TOKENS: Final = 1e-3
MOST_TOKENS: Final = 1e8

HIT_SHARE: Final = 0.05
"""Weight of the newest observation in what prefix caches hold."""

UNPROVEN: Final = 2.0
MOST_LATE: Final = 4.0
"""Silence for so many times as long as was predicted is no matter of bad predictions any more."""

UNTOLD_MS: Final = 10_000.0
"""First sign of life of a request of which nothing could be predicted."""

YOUNG: Final = 64
"""While a pool's shape is that young it still moves much: levels of all its nodes are recomputed with it."""


DEFAULTS: Final = Tuning()


@dataclass(slots=True)
class _Node:
    ttft: Level = field(default_factory=Level)
    tpot: Level = field(default_factory=Level)
    open: dict[str, float] = field(default_factory=dict)
    progress_s: float = -math.inf

    def due(self) -> float:
        """Decoding requests owe a token now, others their first one when it was predicted."""
        if not self.open:
            return math.inf
        return max(self.progress_s, min(self.open.values()))


@dataclass(slots=True)
class _Pool:
    ttft: Shape
    tpot: Shape
    lengths: Lengths
    ttft_base: Level = field(default_factory=Level)
    tpot_base: Level = field(default_factory=Level)
    hit: float = 0.0
    hits: int = 0
    uncached: float = 1.0
    nodes: dict[str, _Node] = field(default_factory=dict)

    def uncached_of(self, prompt: float, sample: Sample) -> float:
        """Tokens that had to be computed: told, or guessed. What was told teaches to guess."""
        seen = None if sample.seen_tokens is None else min(prompt, _tokens(sample.seen_tokens))
        if sample.cached_tokens is None:
            return prompt * self.uncached if seen is None else prompt - seen * self.hit
        cached = min(prompt, _tokens(sample.cached_tokens))
        if prompt > 0:
            self.uncached += HIT_SHARE * (1 - cached / prompt - self.uncached)
        if seen:
            self.hits += 1
            self.hit += max(HIT_SHARE, 1 / self.hits) * (min(1.0, cached / seen) - self.hit)
        return prompt - cached


class LatencyModel:
    """Args:
    seeds: by pool; a pool without one is learned from nothing.
    """

    def __init__(self, seeds: Mapping[str, PoolSeed] | None = None, tuning: Tuning = DEFAULTS) -> None:
        self._tuning = tuning
        self._pools: dict[str, _Pool] = {}
        self._rows: dict[tuple[str, str], NodeRow] = {}
        self._pool_rows: dict[str, PoolRow] = {}
        self._prefixes = Prefixes()
        self._errors: dict[tuple[str, Metric], Errors] = {}
        self._dirty: dict[str, set[str]] = {}
        self._moved: set[tuple[str, str]] = set()
        self._table = LatencyTable()
        self._frozen_s = -math.inf
        for name, seed in (seeds or {}).items():
            self._pools[name] = _pool(seed)
            self._dirty[name] = set()

    # what happened

    def observe(self, sample: Sample) -> None:
        """Learn from one observation. Senseless numbers (not finite, not positive, absurd) are ignored."""
        node = self._node(sample.pool, sample.node)
        pool = self._pools[sample.pool]
        prompt = _tokens(sample.prompt_tokens)
        uncached = pool.uncached_of(prompt, sample)
        if _sensible(sample.ttft_ms):
            u, v = uncached, _tokens(sample.backlog_tokens)
            _learn(pool.ttft, pool.ttft_base, node.ttft, sample.at_s, u, v, sample.ttft_ms)
        if _sensible(sample.tpot_ms):
            context = prompt if sample.context_tokens is None else _tokens(sample.context_tokens)
            u = max(0.0, _tokens(sample.running) - 1)
            _learn(pool.tpot, pool.tpot_base, node.tpot, sample.at_s, u, context, sample.tpot_ms)
        if sample.output_tokens is not None:
            pool.lengths.add(sample.output_tokens)
        self._touch(sample.pool, sample.node)

    def begin(self, pool: str, node: str, request_id: str, first_by_s: float) -> None:
        """A request was sent to a node.

        Args:
            first_by_s: monotonic seconds at which its first token is expected, waiting included; infinite for one
                that gives no sign of life before its end.
        """
        self._node(pool, node).open[request_id] = first_by_s
        self._moved.add((pool, node))

    def latest_ms(self, pool: str, ttft_ms: float | None) -> float:
        """How long a first token that is expected in ``ttft_ms`` (None = nothing is known) may take without anything
        being wrong: as much longer as such predictions have been wrong before."""
        if ttft_ms is None:
            return UNTOLD_MS
        errors = self._errors.get((pool, "ttft"))
        late = None if errors is None else errors.late
        return ttft_ms * (UNPROVEN if late is None else min(MOST_LATE, max(1.0, late)))

    def progress(self, pool: str, node: str, request_id: str, now: float) -> None:
        """Tokens of it came."""
        entry = self._node(pool, node)
        entry.progress_s = max(entry.progress_s, now)
        if request_id in entry.open:
            entry.open[request_id] = now
        self._moved.add((pool, node))

    def end(self, pool: str, node: str, request_id: str) -> None:
        """It ended, however. Unknown ids are ignored."""
        self._node(pool, node).open.pop(request_id, None)
        self._moved.add((pool, node))

    def compare(self, pool: str, metric: Metric, predicted_ms: float | None, observed_ms: float | None) -> None:
        """A prediction came true, more or less. None on either side is not counted."""
        if _sensible(predicted_ms) and _sensible(observed_ms):
            self._errors.setdefault((pool, metric), Errors()).add(predicted_ms, observed_ms)

    def forget(self, pool: str, node: str) -> None:
        """The node left."""
        if pool in self._pools:
            self._pools[pool].nodes.pop(node, None)
        self._rows.pop((pool, node), None)
        self._moved.discard((pool, node))
        self._dirty.setdefault(pool, set()).discard(node)

    def remember(self, prefix: Sequence[int]) -> None:
        """A prompt with these digests was sent to be computed."""
        self._prefixes.add(prefix)

    # what follows from it

    def freeze(self, now: float) -> LatencyTable:
        """What is known now; the same object until something new is known and ``refresh_s`` have passed."""
        if (self._dirty or self._moved) and not 0 <= now - self._frozen_s < self._tuning.refresh_s:
            for name, nodes in self._dirty.items():
                self._settle(name, nodes, now)
            for key in self._moved:
                self._rows[key] = replace(self._rows.get(key, NO_NODE), due_s=self._node(*key).due())
            self._dirty.clear()
            self._moved.clear()
            self._frozen_s = now
            self._table = LatencyTable(dict(self._pool_rows), dict(self._rows))
        return self._table

    def seen_tokens(self, prefix: Sequence[int], prompt_tokens: int) -> int | None:
        """How many tokens of a prompt begin another one that was sent before; None if it has no digests."""
        return int(self._prefixes.share(prefix) * prompt_tokens) if prefix else None

    def remaining(self, pool: str, produced: int, cap: int | None = None) -> float | None:
        """Output tokens that a running request may still produce; None = unknown.

        Args:
            produced: so far. cap: its limit on the whole answer.
        """
        entry = self._pools.get(pool)
        if entry is None:
            return None if cap is None else float(max(0, cap - produced))
        return entry.lengths.remaining(produced, cap)

    def errors(self) -> Mapping[tuple[str, Metric], Calibration]:
        """How good the predictions were, by pool and metric; only where something was compared."""
        found = {key: errors.summary() for key, errors in self._errors.items()}
        return {key: summary for key, summary in found.items() if summary is not None}

    # inside

    def _node(self, pool: str, node: str) -> _Node:
        if pool not in self._pools:
            self._pools[pool] = _pool(PoolSeed())
        nodes = self._pools[pool].nodes
        if node not in nodes:
            nodes[node] = _Node()
        return nodes[node]

    def _touch(self, pool: str, node: str) -> None:
        self._dirty.setdefault(pool, set()).add(node)

    def _settle(self, name: str, dirty: set[str], now: float) -> None:
        pool, tuning = self._pools.get(name), self._tuning
        if pool is None:
            return
        pool.ttft.fit()
        pool.tpot.fit()
        young = any(0 < shape.count < YOUNG for shape in (pool.ttft, pool.tpot))
        nodes = pool.nodes if young else {n: pool.nodes[n] for n in dirty if n in pool.nodes}
        for entry in nodes.values():
            entry.ttft.settle(pool.ttft, _anchor(entry.ttft, pool.ttft_base), now, tuning.stale_s)
            entry.tpot.settle(pool.tpot, _anchor(entry.tpot, pool.tpot_base), now, tuning.stale_s)
        for node, entry in nodes.items():
            self._rows[name, node] = NodeRow(self._factor(entry.ttft), self._factor(entry.tpot), entry.due())
        everyone = pool.nodes.values()
        self._pool_rows[name] = PoolRow(
            ttft=self._line(pool.ttft, [e.ttft for e in everyone], now),
            tpot=self._line(pool.tpot, [e.tpot for e in everyone], now),
            hit=pool.hit,
            uncached=pool.uncached,
            output_tokens=pool.lengths.mean(),
        )

    def _factor(self, level: Level) -> Factor:
        if not level.count:
            return Factor()
        return Factor(
            recent=math.exp(level.recent),
            recent_until=level.last_s + self._tuning.stale_s,
            base=math.exp(level.base),
            base_until=level.last_s + self._tuning.forget_s,
        )

    def _line(self, shape: Shape, levels: list[Level], now: float) -> Line:
        """With the pool's factor: the lower median of its nodes', so that one sick node condemns no other."""
        seen = [level for level in levels if level.count and level.last_s + self._tuning.forget_s >= now]
        factor = Factor()
        if seen:
            fresh = [level for level in seen if level.last_s + self._tuning.stale_s >= now]
            last = max(level.last_s for level in seen)
            factor = Factor(
                recent=math.exp(_lower_median([level.recent for level in fresh])) if fresh else 1.0,
                recent_until=last + self._tuning.stale_s if fresh else -math.inf,
                base=math.exp(_lower_median([level.base for level in seen])),
                base_until=last + self._tuning.forget_s,
            )
        return Line(shape.coefficients, shape.seed if shape.seeded else None, factor)


def _pool(seed: PoolSeed) -> _Pool:
    waiting = seed.ttft_ms_per_waiting_token
    if waiting is None:
        waiting = seed.ttft_ms_per_token
    return _Pool(
        ttft=Shape((seed.ttft_ms, seed.ttft_ms_per_token, waiting)),
        tpot=Shape((seed.tpot_ms, seed.tpot_ms_per_request, seed.tpot_ms_per_context_token)),
        lengths=Lengths(seed.output_tokens),
    )


def _learn(shape: Shape, base: Level, level: Level, at_s: float, u: float, v: float, time: float) -> None:
    """A settled shape learns the form only, so it sees times without the node's level."""
    settled = shape.count >= SETTLED
    shape.learn(u, v, time * math.exp(-level.recent) if settled else time)
    if shape.count <= 2 or shape.count % 8 == 0:
        shape.fit()
    level.add(at_s, u, v, time)
    base.count += 1
    if settled:
        level.drift(shape, u, v, time)
        base.drift(shape, u, v, time)


def _anchor(level: Level, pool: Level) -> float:
    return level.base if level.count >= YOUNG else pool.base


def _lower_median(values: list[float]) -> float:
    values.sort()
    return values[(len(values) - 1) // 2]


def _tokens(value: float) -> float:
    return min(MOST_TOKENS, value) if value > LEAST_TOKENS else 0.0


def _sensible(value: float | None) -> TypeGuard[float]:
    return value is not None and LEAST_MS <= value < MOST_MS
