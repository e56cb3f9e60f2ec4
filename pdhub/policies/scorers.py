"""Scorers without memory. Each gives numbers from 0 to 1, 1 for the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from pdhub.api.plugin import NoConfig, PluginConfig
from pdhub.api.policy import NodeView, PoolView, Prediction, Predictor, Scorer
from pdhub.api.request import RequestView
from pdhub.policies.occupancy import fullness, places, waiting

Nodes = Sequence[tuple[PoolView, NodeView]]


class LoadScorer(Scorer):
    """1 for an idle node, a half for one with as many requests as places."""

    def __init__(self, config: NoConfig) -> None:
        del config

    def score(self, request: RequestView, nodes: Nodes, now: float) -> Sequence[float]:
        return [1 / (1 + fullness(pool, node)) for pool, node in nodes]


class QueueDepthScorer(Scorer):
    """1 where nobody waits, a half where as many wait as run."""

    def __init__(self, config: NoConfig) -> None:
        del config

    def score(self, request: RequestView, nodes: Nodes, now: float) -> Sequence[float]:
        return [1 / (1 + waiting(pool, node) / places(pool, node)) for pool, node in nodes]


class BacklogScorerConfig(PluginConfig):
    """Options of ``backlog``."""

    scale_tokens: int = Field(4096, ge=1, description="Prompt tokens on the way at which a node's score is a half.")


class BacklogScorer(Scorer):
    """By the prompt tokens that were sent to a node and are not computed yet: 1 for none."""

    def __init__(self, config: BacklogScorerConfig) -> None:
        self._scale = config.scale_tokens

    def score(self, request: RequestView, nodes: Nodes, now: float) -> Sequence[float]:
        return [1 / (1 + node.pending_tokens / self._scale) for _, node in nodes]


class CostScorer(Scorer):
    """1 for the cheapest pool, a half for one that costs twice as much."""

    def __init__(self, config: NoConfig) -> None:
        del config

    def score(self, request: RequestView, nodes: Nodes, now: float) -> Sequence[float]:
        least = min((pool.cost for pool, _ in nodes), default=0.0)
        return [1.0 if pool.cost <= least else least / pool.cost for pool, _ in nodes]


class HeadroomConfig(PluginConfig):
    """Options of ``headroom``."""

    prefer: Literal["most", "least"] = Field(
        "most", description="`least` fills the node that just attains the targets, `most` spreads."
    )


class HeadroomScorer(Scorer):
    """By what a prediction leaves of the tightest target: above a half attains, below misses, a half is unknown."""

    def __init__(self, config: HeadroomConfig, latency: Predictor | None = None) -> None:
        self._config = config
        self._latency = latency

    def using(self, latency: Predictor) -> HeadroomScorer:
        return HeadroomScorer(self._config, latency)

    def score(self, request: RequestView, nodes: Nodes, now: float) -> Sequence[float]:
        latency = self._latency
        if latency is None:
            return [0.5] * len(nodes)
        return [self._one(request, latency.predict(request, pool, node, now), now) for pool, node in nodes]

    def _one(self, request: RequestView, predicted: Prediction, now: float) -> float:
        left = headroom(request, predicted, now)
        if left is None:
            return 0.5
        if left < 0:
            return 0.5 * (1 + max(left, -1.0))
        return 0.5 + 0.5 * (left if self._config.prefer == "most" else 1 - left)


def headroom(request: RequestView, predicted: Prediction, now: float) -> float | None:
    """What is left of the tightest target, as a share of it: 1 all, 0 nothing, negative a miss; None = unknown or
    without target."""
    slo, left = request.slo, []
    if slo.tpot_ms is not None and predicted.tpot_ms is not None:
        left.append(1 - predicted.tpot_ms / slo.tpot_ms)
    if slo.ttft_ms is not None and predicted.ttft_ms is not None:
        waited = (now - request.arrived_s) * 1000 if request.arrived_s else 0.0
        left.append(1 - (waited + predicted.ttft_ms) / slo.ttft_ms)
    return min(left, default=None)
