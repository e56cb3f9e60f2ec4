"""Filters and scorers at work, whoever configured them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pdhub.api.policy import Candidate, Filter, NodeView, PoolView, Predictor, Scorer
from pdhub.api.request import RequestRecord, RequestView
from pdhub.policies.instances import Instances
from pdhub.policies.routing import Part

Nodes = Sequence[tuple[PoolView, NodeView]]
Key = tuple[str, str]


class Filters:
    """In order; the first that drops a node is its reason."""

    def __init__(self, parts: Iterable[Part], instances: Instances) -> None:
        self._filters = [(part, cast(Filter, instances.make(part))) for part in parts]

    def __bool__(self) -> bool:
        return bool(self._filters)

    def keep(self, request: RequestView, nodes: Nodes, latency: Predictor, now: float) -> tuple[Nodes, list[Candidate]]:
        """The nodes that no filter drops, and the dropped ones. A soft filter that would leave nobody is ignored."""
        dropped: list[Candidate] = []
        for part, configured in self._filters:
            filter_ = configured.using(latency)
            left, gone = [], []
            for pool, node in nodes:
                why = filter_.drop(request, pool, node, now)
                if why is None:
                    left.append((pool, node))
                else:
                    gone.append(Candidate(pool.name, node.name, dropped_by=part.name, why=why))
            if part.soft and not left:
                continue
            nodes = left
            dropped += gone
        return nodes, dropped


@dataclass(frozen=True, slots=True)
class Ranked:
    """Args:
    total: the weighted mean of a node's scores, between 0 and 1. parts: of each scorer, those of all nodes in the order
        of ``total``.
    """

    total: Mapping[Key, float]
    parts: Sequence[tuple[str, Sequence[float]]]

    def scores(self) -> dict[Key, dict[str, float]]:
        """Of each node, by scorer; for explanations."""
        return {key: {name: values[n] for name, values in self.parts} for n, key in enumerate(self.total)}


class Scorers:
    """The weighted mean of what all of them say."""

    def __init__(self, parts: Iterable[Part], instances: Instances) -> None:
        self._scorers = [(part, cast(Scorer, instances.make(part))) for part in parts]
        self._weight = sum(part.weight for part, _ in self._scorers) or 1.0

    def __bool__(self) -> bool:
        return bool(self._scorers)

    def rate(self, request: RequestView, nodes: Nodes, latency: Predictor, now: float) -> Ranked:
        """Scores outside 0 … 1 are clamped, what is no number counts as 0: one bad scorer spoils no decision."""
        totals = [0.0] * len(nodes)
        parts: list[tuple[str, Sequence[float]]] = []
        for part, configured in self._scorers:
            values = [_sane(raw) for raw in configured.using(latency).score(request, nodes, now)]
            share = part.weight / self._weight
            totals = [total + share * value for total, value in zip(totals, values, strict=True)]
            parts.append((part.name, values))
        keys = [(pool.name, node.name) for pool, node in nodes]
        return Ranked(dict(zip(keys, totals, strict=True)), parts)

    def observe(self, record: RequestRecord) -> None:
        for _, scorer in self._scorers:
            scorer.observe(record)


def _sane(raw: float) -> float:
    # Comparisons with what is no number are false, so that it falls through to 0.
    return float(raw) if 0.0 <= raw <= 1.0 else 1.0 if 1.0 < raw < math.inf else 0.0
