"""Rules, filters, scorers and the base policy as one policy: what the router, ``pdhub explain`` and the lab ask.

A request goes through it like this::

    1 capability, context and health drop nodes       capable.py
    2 the policy's filters, then the rule's           ranking.py
    3 the nodes that are left form groups by pool, best group first:
        the rule's pools, then its fallback;  without a rule: all pools, then those in reserve
    4 inside a group the base policy decides (or the rule's scorers); the policy's scorers rank each pool's nodes
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from pdhub.api.policy import (
    Candidate,
    Decision,
    NodeView,
    Policy,
    PoolView,
    Prediction,
    Predictor,
    Reason,
    Snapshot,
)
from pdhub.api.request import RequestRecord, RequestView
from pdhub.policies.candidates import Candidates
from pdhub.policies.capable import sift
from pdhub.policies.draw import mix, seed_of, unit
from pdhub.policies.instances import Instances
from pdhub.policies.prefill import PrefillChoice, PrefillChoiceConfig
from pdhub.policies.ranking import Filters, Key, Nodes, Ranked, Scorers
from pdhub.policies.routing import Routing, Rule

INCAPABLE = frozenset({"role", "model", "capability", "context"})
"""What :func:`sift` drops a node by, whatever its health."""


class Composable(Protocol):
    """What :func:`compose` reads of a plan."""

    @property
    def routing(self) -> Routing: ...


def compose(plan: Composable, instances: Instances | None = None) -> Composed:
    """The policy. Without ``instances`` a fresh one, which has learned nothing yet.

    Raises:
        Whatever a plugin's factory raises: ConfigError for options that it cannot use.
    """
    return Composed(plan.routing, instances or Instances())


def compose_prefill(plan: Composable, instances: Instances | None = None) -> Policy:
    """The policy that chooses prefill instances: of a snapshot whose pools have the role ``prefill``."""
    part = plan.routing.prefill
    if part is None:
        return PrefillChoice(PrefillChoiceConfig())
    return cast(Policy, (instances or Instances()).make(part))


@dataclass(frozen=True, slots=True)
class _Group:
    """Pools that are chosen from together. ``scorers``: instead of the base policy."""

    pools: tuple[str, ...]
    scorers: Scorers | None = None


class _Once:
    """Filters, the base policy and scorers ask for the same predictions: each is made once a choice. A predictor.

    Args:
        request, now: of the choice; what is asked for another is not remembered.
    """

    __slots__ = ("_latency", "_made", "_mine", "_now", "_pool", "_request")

    def __init__(self, latency: Predictor, request: RequestView, now: float) -> None:
        self._latency = latency
        self._request: RequestView | None = request
        self._now = now
        self._made: dict[tuple[str, int], dict[str, Prediction]] = {}
        self._pool: PoolView | None = None
        self._mine: dict[str, Prediction] = {}

    def predict(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> Prediction:
        if request is not self._request or now != self._now:
            return self._latency.predict(request, pool, node, now)
        if pool is not self._pool:
            # Queues are shared by the nodes that are left of a pool, so their number counts.
            self._pool, self._mine = pool, self._made.setdefault((pool.name, len(pool.nodes)), {})
        found = self._mine.get(node.name)
        if found is None:
            found = self._mine[node.name] = self._latency.predict(request, pool, node, now)
        return found

    def forget(self) -> None:
        """Remember nothing from now on: decisions are kept for those who may ask why."""
        self._request = self._pool = None
        self._made, self._mine = {}, {}


class _Rule:
    """A rule and its plugins."""

    def __init__(self, rule: Rule, instances: Instances) -> None:
        self.name = rule.name
        self.match = rule.match
        self.filters = Filters(rule.filters, instances)
        self.scorers = Scorers(rule.scorers, instances)
        self.directs = bool(rule.pools or rule.weights or rule.scorers)
        self.reason = Reason.WEIGHT if rule.weights else Reason.RULE
        self._rule = rule

    def groups(self, request: RequestView, pools: Sequence[str], reserve: Sequence[str]) -> list[_Group]:
        """The order in which pools are tried. Pools in none of the groups are out."""
        rule = self._rule
        named = _draw(rule, request) if rule.weights else rule.pools
        if self.scorers:
            first = named or tuple(p for p in pools if p not in reserve)
            groups = [_Group(first, self.scorers)]
        elif named:
            first = named
            groups = [_Group((pool,)) for pool in named]
        else:
            first = tuple(p for p in pools if p not in reserve)
            groups = [_Group(first)]
        if rule.fallback is None:
            others = tuple(p for p in pools if p not in first and p not in reserve)
            return [*groups, _Group(others), *(_Group((p,)) for p in reserve if p not in first)]
        return [*groups, *(_Group((p,)) for p in rule.fallback if p not in first)]


class Composed(Policy):
    """Made by :func:`compose`. ``shadow``: the policy that is only asked, never followed; None = there is none."""

    def __init__(self, routing: Routing, instances: Instances) -> None:
        base = routing.base
        self.name = base.name
        self.shadow = Composed(routing.shadow, instances) if routing.shadow is not None else None
        self._base = cast(Policy, instances.make(base))
        self._filters = Filters(routing.filters, instances)
        self._scorers = Scorers(routing.scorers, instances)
        self._rules = [_Rule(rule, instances) for rule in routing.rules]
        self._reserve = routing.fallback
        self._plain = not (routing.filters or routing.scorers or routing.fallback)

    def choose(self, request: RequestView, snapshot: Snapshot, now: float, rng: random.Random) -> Decision:
        rule = next((r for r in self._rules if r.match.holds(request)), None)
        if rule is None and self._plain:
            return self._base.choose(request, snapshot, now, rng)
        once = _Once(snapshot.latency, request, now)
        snapshot = replace(snapshot, latency=once)
        nodes, out, nobody = sift(request, snapshot.pools)
        usable = bool(nodes)
        kept: Nodes = nodes
        for filters in (self._filters, rule.filters if rule else None):
            if filters:
                kept, dropped = filters.keep(request, kept, snapshot.latency, now)
                out += dropped
        groups = self._groups(rule, request, snapshot.pools)
        asked: list[tuple[int, Decision]] = []
        for number, group in enumerate(groups):
            if part := _pools(kept, group.pools):
                asked.append((number, self._ask(group, request, replace(snapshot, pools=part), now, rng)))
        named = {pool for group in groups for pool in group.pools}
        why = f"rule '{rule.name}' leaves this pool out" if rule else "left out"
        out += [Candidate(p.name, n.name, dropped_by="rule", why=why) for p, n in kept if p.name not in named]
        order = tuple(itertools.chain.from_iterable(decision.order for _, decision in asked))
        once.forget()
        return Decision(
            order=order,
            candidates=Candidates(lambda: itertools.chain(out, *(decision.candidates for _, decision in asked))),
            reason=_reason(rule, asked, _nobody(out, named) if usable else nobody),
            policy=self.name,
            rule=rule.name if rule else None,
        )

    def observe(self, record: RequestRecord) -> None:
        self._base.observe(record)
        self._scorers.observe(record)
        for rule in self._rules:
            rule.scorers.observe(record)
        if self.shadow is not None:
            self.shadow.observe(record)

    def _groups(self, rule: _Rule | None, request: RequestView, pools: Iterable[PoolView]) -> list[_Group]:
        names = sorted(pool.name for pool in pools)
        if rule is not None:
            return rule.groups(request, names, self._reserve)
        first = tuple(p for p in names if p not in self._reserve)
        return [_Group(first), *(_Group((p,)) for p in self._reserve)]

    def _ask(self, group: _Group, request: RequestView, snapshot: Snapshot, now: float, rng: random.Random) -> Decision:
        nodes = [(pool, node) for pool in snapshot.pools for node in pool.nodes]
        if group.scorers is not None:
            ranked = group.scorers.rate(request, nodes, snapshot.latency, now)
            seed = seed_of(request.id)
            keys = sorted(ranked.total, key=lambda k: (-ranked.total[k], mix(seed, k[1]), k))
            made = Candidates(lambda: [Candidate(*key, scores=scores) for key, scores in ranked.scores().items()])
            return Decision(tuple(keys), made, Reason.RULE, self.name)
        decision = self._base.choose(request, snapshot, now, rng)
        if not self._scorers or not decision.order:
            return decision
        ranked = self._scorers.rate(request, nodes, snapshot.latency, now)
        return _reranked(decision, ranked, request, nodes, snapshot, now)


def _reranked(
    decision: Decision, ranked: Ranked, request: RequestView, nodes: Nodes, snapshot: Snapshot, now: float
) -> Decision:
    """Nodes of one pool that the base policy put next to each other, by score. A node that is predicted to miss a
    target stays behind those that are not."""
    missing = _missing(request, nodes, snapshot, now)
    seed, total = seed_of(request.id), ranked.total
    order: list[Key] = []
    for _, run in itertools.groupby(decision.order, key=lambda key: key[0]):
        order += sorted(run, key=lambda k: (k in missing, -total[k], mix(seed, k[1]), k))

    def candidates() -> Iterable[Candidate]:
        scores = ranked.scores()
        for c in decision.candidates:
            mine = scores.get((c.pool, c.node), {}) if c.kept else {}
            yield replace(c, scores={**c.scores, **mine}) if mine else c

    return replace(decision, order=tuple(order), candidates=Candidates(candidates))


def _missing(request: RequestView, nodes: Nodes, snapshot: Snapshot, now: float) -> set[Key]:
    """Those that are predicted to miss a target."""
    slo, predict = request.slo, snapshot.latency.predict
    if slo.ttft_ms is None and slo.tpot_ms is None:
        return set()
    waited = (now - request.arrived_s) * 1000 if request.arrived_s else 0.0
    first, each = (math.inf if target is None else target for target in (slo.ttft_ms, slo.tpot_ms))
    found: set[Key] = set()
    for pool, node in nodes:
        seen = predict(request, pool, node, now)
        if (seen.ttft_ms or 0.0) + waited > first or (seen.tpot_ms or 0.0) > each:
            found.add((pool.name, node.name))
    return found


def _pools(nodes: Nodes, names: Sequence[str]) -> tuple[PoolView, ...]:
    """The named pools with only these nodes; pools without any are left out."""
    by_pool: dict[str, tuple[PoolView, list[NodeView]]] = {}
    for pool, node in nodes:
        if pool.name in names:
            by_pool.setdefault(pool.name, (pool, []))[1].append(node)
    return tuple(
        pool if len(left) == len(pool.nodes) else replace(pool, nodes=tuple(left)) for pool, left in by_pool.values()
    )


def _draw(rule: Rule, request: RequestView) -> tuple[str, ...]:
    """The pool that this request, session or tenant draws, then the others by weight."""
    key = {"session": request.session, "tenant": request.tenant}.get(rule.sticky) or request.id
    weights = [(pool, weight) for pool, weight in rule.weights if weight > 0]
    point = unit(seed_of(f"{rule.name}\0{key}")) * sum(weight for _, weight in weights)
    drawn = weights[-1][0]
    for pool, weight in weights:
        if point < weight:
            drawn = pool
            break
        point -= weight
    others = sorted((w for w in weights if w[0] != drawn), key=lambda w: (-w[1], w[0]))
    return (drawn, *(pool for pool, _ in others))


def _nobody(dropped: Iterable[Candidate], named: Collection[str]) -> Reason:
    """Why none of the named pools has anybody: what a client may repair first, then what passes by itself."""
    by = {c.dropped_by for c in dropped if c.pool in named}
    if by and by <= INCAPABLE:
        return Reason.NO_CAPABLE_POOL
    return Reason.NO_HEALTHY_NODE if by and by <= INCAPABLE | {"health"} else Reason.FILTERED


def _reason(rule: _Rule | None, asked: Sequence[tuple[int, Decision]], nobody: Reason) -> Reason:
    for number, decision in asked:
        if decision.order:
            if number > 0:
                return Reason.FALLBACK
            return rule.reason if rule is not None and rule.directs else decision.reason
    reasons = [decision.reason for _, decision in asked]
    for known in (Reason.SHED, Reason.NO_HEALTHY_NODE, Reason.NO_CAPABLE_POOL):
        if known in reasons:
            return known
    return nobody
