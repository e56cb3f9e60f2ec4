"""Filters that come with the host."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdhub.api.plugin import NoConfig, PluginConfig
from pdhub.api.policy import Filter, NodeView, PoolView, Prediction, Predictor
from pdhub.api.request import RequestView
from pdhub.policies.capable import USABLE, incapable, too_long
from pdhub.policies.draw import mix, seed_of, unit


class CapabilityFilter(Filter):
    """Drops pools that lack something the request asks for. The host does that in any case."""

    def __init__(self, config: NoConfig) -> None:
        del config

    def drop(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> str | None:
        return incapable(request, pool)


class HealthFilter(Filter):
    """Drops nodes that are not ready. The host does that in any case."""

    def __init__(self, config: NoConfig) -> None:
        del config

    def drop(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> str | None:
        return None if node.health in USABLE else f"is {node.health}"


class ContextLengthConfig(PluginConfig):
    """Options of ``context_length``."""

    reserve: int = Field(0, ge=0, description="Output tokens to keep room for where the client names no limit.")
    at_most: int | None = Field(None, ge=1, description="Drop nodes for requests longer than this, prompt and output.")


class ContextLengthFilter(Filter):
    """Drops pools whose context is too short, with room for the output that the client did not limit."""

    def __init__(self, config: ContextLengthConfig) -> None:
        self._config = config

    def drop(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> str | None:
        needed = request.prompt_tokens + (request.max_tokens or max(1, self._config.reserve))
        if self._config.at_most is not None and needed > self._config.at_most:
            return f"takes requests of at most {self._config.at_most} tokens, not {needed}"
        return too_long(needed, pool)


class LabelConfig(PluginConfig):
    """Options of ``label``."""

    match: dict[str, str] = Field(min_length=1, description="Labels and their values; `*` matches any value.")
    mode: Literal["require", "exclude"] = Field(
        "require", description="`require` keeps nodes with all of these labels, `exclude` drops those with any."
    )


class LabelFilter(Filter):
    """Keeps or drops nodes by label; a node's own label wins over its pool's."""

    def __init__(self, config: LabelConfig) -> None:
        self._config = config

    def drop(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> str | None:
        require = self._config.mode == "require"
        for label, wanted in self._config.match.items():
            found = node.labels.get(label, pool.labels.get(label))
            hit = found is not None and wanted in ("*", found)
            if require and not hit:
                return f"label {label} is {found or 'not set'}, not {wanted}"
            if hit and not require:
                return f"label {label} is {found}"
        return None


class SloHeadroomConfig(PluginConfig):
    """Options of ``slo_headroom``."""

    margin: float = Field(1.0, gt=0, description="Share of a target that a prediction may use up.")
    explore: float = Field(
        0.02,
        ge=0,
        le=1,
        description="Share of requests that are let through all the same: a bad estimate is tried again.",
    )


class SloHeadroomFilter(Filter):
    """Drops nodes that are predicted to miss a target. What is unknown is kept."""

    def __init__(self, config: SloHeadroomConfig, latency: Predictor | None = None) -> None:
        self._config = config
        self._latency = latency

    def using(self, latency: Predictor) -> SloHeadroomFilter:
        return SloHeadroomFilter(self._config, latency)

    def drop(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> str | None:
        slo = request.slo
        if self._latency is None or (slo.ttft_ms is None and slo.tpot_ms is None):
            return None
        predicted = self._latency.predict(request, pool, node, now)
        missed = _missed(request, predicted, now, self._config.margin)
        if missed is None or unit(mix(seed_of(request.id), "slo_headroom")) < self._config.explore:
            return None
        return missed


def _missed(request: RequestView, predicted: Prediction, now: float, margin: float) -> str | None:
    slo = request.slo
    waited = (now - request.arrived_s) * 1000 if request.arrived_s else 0.0
    for name, target, value, spent in (
        ("TTFT", slo.ttft_ms, predicted.ttft_ms, waited),
        ("TPOT", slo.tpot_ms, predicted.tpot_ms, 0.0),
    ):
        if target is not None and value is not None and value + spent > target * margin:
            return f"predicted {name} of {value + spent:.1f} ms misses the target of {target:g} ms"
    return None
