"""The router's Prometheus metrics. Each router has a registry of its own, so that several fit in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pdhub.api.errors import (
    AdmissionRejected,
    EngineFailed,
    InvalidRequest,
    LayoutMismatch,
    LeaseExpired,
    ModelNotFound,
    RequestCancelled,
    TransferFailed,
)
from pdhub.api.policy import Reason
from pdhub.api.request import RequestRecord
from pdhub.core.latency import Calibration
from pdhub.core.latency import Metric as LatencyMetric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0)
_CODES = frozenset(
    cls.code
    for cls in (
        AdmissionRejected, EngineFailed, InvalidRequest, LayoutMismatch, LeaseExpired, ModelNotFound, RequestCancelled,
        TransferFailed,
    )
) | {
    "busy", "no_endpoints", "context_length_exceeded", "request_too_large", "upstream_timeout", "request_timeout",
    "internal_error", "queue_full", "queue_timeout", "shed",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LiveRules:
    """Args:
    policy: its name. version: digest of its configuration. since_s: epoch seconds at which it became live.
    failing: the last reload failed. dropped: lines of the decision log that were lost.
    """

    policy: str
    version: str
    since_s: float
    failing: bool
    dropped: int


class RouterMetrics:
    """Label values come from the configuration and from closed sets, never from a client.

    Args:
        endpoints: now: (endpoint, in flight, whether it is usable).
        waiting: now: requests in each pool's queue.
        lines: now: (prefill instance, requests that wait for their turn there, tokens sent to it, how many may be).
        predictions: now: how good they were, by (pool, metric). rules: now: what is live.
        pairs: now: (prefill instance, node, whether requests may take that path).
        caches: now: (endpoint that tells it, blocks known to be in its prefix cache).
        leftovers: now: (prefill instance, hand-overs whose KV waits for the end of its lease, seconds until the last).
        stranded: now: (decode node, share of its KV memory that it holds for nobody).
    """

    def __init__(
        self,
        endpoints: Callable[[], Iterable[tuple[str, int, bool]]],
        waiting: Callable[[], Mapping[str, int]],
        lines: Callable[[], Iterable[tuple[str, int, int, int]]],
        predictions: Callable[[], Mapping[tuple[str, LatencyMetric], Calibration]],
        rules: Callable[[], LiveRules],
        pairs: Callable[[], Iterable[tuple[str, str, bool]]] = lambda: (),
        caches: Callable[[], Iterable[tuple[str, int]]] = lambda: (),
        leftovers: Callable[[], Iterable[tuple[str, int, float]]] = lambda: (),
        stranded: Callable[[], Iterable[tuple[str, float]]] = lambda: (),
    ) -> None:
        self.registry = CollectorRegistry()
        self._endpoints = endpoints
        self._waiting = waiting
        self._lines = lines
        self._predictions = predictions
        self._rules = rules
        self._pairs = pairs
        self._caches = caches
        self._leftovers = leftovers
        self._stranded = stranded
        r = self.registry
        self.requests = Counter(
            "pdhub_router_requests_total", "Requests that ended.", ["pool", "outcome", "code"], registry=r
        )
        self.ttft = Histogram(
            "pdhub_router_ttft_seconds", "Arrival to first token.", ["pool"], buckets=_LATENCY, registry=r
        )
        self.tpot = Histogram(
            "pdhub_router_tpot_seconds", "Time per output token.", ["pool"], buckets=_TOKEN, registry=r
        )
        self.itl_p99 = Histogram(
            "pdhub_router_itl_p99_seconds",
            "Of each request, the gap between tokens that 99 of 100 do not exceed.",
            ["pool"],
            buckets=_TOKEN,
            registry=r,
        )
        self.total = Histogram(
            "pdhub_router_request_seconds", "Arrival to end.", ["pool"], buckets=_LATENCY, registry=r
        )
        self.queued = Histogram(
            "pdhub_router_queue_seconds", "Wait in a pool's queue.", ["pool"], buckets=_LATENCY, registry=r
        )
        self.handoff = Histogram(
            "pdhub_router_handoff_seconds", "Prefill answered to KV usable.", ["pool"], buckets=_LATENCY, registry=r
        )
        self.handoff_bytes = Counter("pdhub_router_handoff_bytes_total", "KV handed over.", ["pool"], registry=r)
        self.tokens = Counter(
            "pdhub_router_tokens_total",
            "Tokens: `prompt` and `completion` as counted or told, `prompt_estimated` and `completion_estimated` where "
            "a relayed answer told no usage.",
            ["pool", "kind"],
            registry=r,
        )
        self.rebound = Counter(
            "pdhub_router_rebound_total", "Decode nodes changed after prefill.", ["pool"], registry=r
        )
        self.retries = Counter("pdhub_router_retries_total", "Attempts after a failed one.", ["pool"], registry=r)
        self.cancels = Counter("pdhub_router_cancels_total", "Cancel calls.", ["result"], registry=r)
        self.reclaims = Counter("pdhub_router_reclaims_total", "Landings claimed again, larger.", registry=r)
        self.refused = Counter(
            "pdhub_router_refused_total", "Requests refused, by the reason told.", ["pool", "reason"], registry=r
        )
        self.spilled = Counter(
            "pdhub_router_spilled_total",
            "Requests served by another pool than the policy's first.",
            ["pool"],
            registry=r,
        )
        self.prefill_failures = Counter(
            "pdhub_router_prefill_failures_total", "Failed prefill legs.", ["prefill"], registry=r
        )
        self.left_to_lease = Counter(
            "pdhub_router_left_to_lease_total",
            "Hand-overs that nobody fetched, whose KV only the end of its lease frees.",
            ["prefill"],
            registry=r,
        )
        self.pair_checks = Counter(
            "pdhub_router_pair_checks_total", "Self-checks of pairs: good, bad or unknown.", ["result"], registry=r
        )
        self.shadow = Counter(
            "pdhub_router_shadow_total",
            "Decisions of the shadow policy, by its pool and by what it agrees on with the real one.",
            ["pool", "agrees"],
            registry=r,
        )
        self._unreadable = Counter(
            "pdhub_router_slo_invalid_total", "Targets, classes and tiers that could not be read.", ["name"], registry=r
        )
        self.reloads = Counter(
            "pdhub_router_reloads_total",
            "Reloads of policy and admission: applied, unchanged, invalid or refused.",
            ["result"],
            registry=r,
        )
        self.decisions = Counter(
            "pdhub_router_decisions_total",
            "Ended requests by what was decided.",
            ["pool", "reason", "rule"],
            registry=r,
        )
        self.registry.register(self)

    def unreadable(self, name: str) -> None:
        """A header or member about service was present but could not be read. ``name``: of a closed set."""
        self._unreadable.labels(name).inc()

    def collect(self) -> Iterable[Metric]:
        """Momentary values, read when somebody looks."""
        in_flight = GaugeMetricFamily("pdhub_router_in_flight", "Legs under way.", labels=["endpoint"])
        usable = GaugeMetricFamily("pdhub_router_endpoint_usable", "1 if requests may go there.", labels=["endpoint"])
        for name, count, ok in self._endpoints():
            in_flight.add_metric([name], count)
            usable.add_metric([name], float(ok))
        pairs = GaugeMetricFamily(
            "pdhub_router_pair_usable",
            "1 if requests may be prefilled and decoded there; 0 until the self-check has passed.",
            labels=["prefill", "node"],
        )
        for prefill, node, ok in self._pairs():
            pairs.add_metric([prefill, node], float(ok))
        caches = GaugeMetricFamily(
            "pdhub_router_cache_blocks",
            "Blocks known to be in a prefix cache, of engines that tell it; 0 = unknown.",
            labels=["endpoint"],
        )
        for name, blocks in self._caches():
            caches.add_metric([name], blocks)
        left = GaugeMetricFamily(
            "pdhub_router_leased_handovers",
            "Hand-overs that nobody fetched, whose KV is still there.",
            labels=["prefill"],
        )
        freed = GaugeMetricFamily(
            "pdhub_router_leased_seconds",
            "Until the last of them is freed by the end of its lease.",
            labels=["prefill"],
        )
        for name, count, seconds in self._leftovers():
            left.add_metric([name], count)
            freed.add_metric([name], seconds)
        stranded = GaugeMetricFamily(
            "pdhub_router_stranded_kv_ratio",
            "Share of its KV memory that a decode node holds though nothing runs or waits there.",
            labels=["node"],
        )
        for name, ratio in self._stranded():
            stranded.add_metric([name], ratio)
        waiting = GaugeMetricFamily("pdhub_router_waiting", "Requests in the queue.", labels=["pool"])
        for pool, count in self._waiting().items():
            waiting.add_metric([pool], count)
        return [
            in_flight,
            usable,
            pairs,
            caches,
            left,
            freed,
            stranded,
            waiting,
            *self._turns(),
            *self._calibration(),
            *self._live(),
        ]

    def _turns(self) -> Iterable[Metric]:
        """The line in front of each prefill instance."""
        waiting = GaugeMetricFamily(
            "pdhub_router_prefill_waiting",
            "Requests that wait for their turn at a prefill instance.",
            labels=["prefill"],
        )
        sent = GaugeMetricFamily(
            "pdhub_router_prefill_outstanding_tokens", "Prompt tokens sent to it and not answered.", labels=["prefill"]
        )
        bound = GaugeMetricFamily(
            "pdhub_router_prefill_outstanding_limit_tokens", "Beyond that, prompts wait here.", labels=["prefill"]
        )
        for name, *told in self._lines():
            for family, value in zip((waiting, sent, bound), told, strict=True):
                family.add_metric([name], value)
        return [waiting, sent, bound]

    def _live(self) -> Iterable[Metric]:
        """Which rules are live, and whether the file agrees with them."""
        rules = self._rules()
        info = GaugeMetricFamily("pdhub_router_policy_info", "The live policy; always 1.", labels=["policy", "version"])
        info.add_metric([rules.policy, rules.version], 1)
        since = GaugeMetricFamily("pdhub_router_policy_live_since_seconds", "Epoch time at which it became live.")
        since.add_metric([], rules.since_s)
        failing = GaugeMetricFamily(
            "pdhub_router_reload_failing", "1 if the last reload was not used: what is live is not what the file says."
        )
        failing.add_metric([], float(rules.failing))
        dropped = CounterMetricFamily("pdhub_router_decision_lines_dropped", "Decisions that the log could not take.")
        dropped.add_metric([], rules.dropped)
        return [info, since, failing, dropped]

    def _calibration(self) -> Iterable[Metric]:
        """Predicted against observed, of each pool's last predictions."""
        error = GaugeMetricFamily(
            "pdhub_router_prediction_error_seconds",
            "Absolute error of the latest predictions.",
            labels=["pool", "metric", "quantile"],
        )
        ratio = GaugeMetricFamily(
            "pdhub_router_prediction_ratio",
            "The larger of predicted/observed and observed/predicted; 1 is perfect.",
            labels=["pool", "metric", "quantile"],
        )
        bias = GaugeMetricFamily(
            "pdhub_router_prediction_bias",
            "Median of predicted/observed; above 1 is too pessimistic.",
            labels=["pool", "metric"],
        )
        count = GaugeMetricFamily(
            "pdhub_router_predictions_compared", "Predictions that these figures are of.", labels=["pool", "metric"]
        )
        for (pool, metric), found in self._predictions().items():
            error.add_metric([pool, metric, "0.5"], found.p50_error_ms / 1000)
            error.add_metric([pool, metric, "0.9"], found.p90_error_ms / 1000)
            ratio.add_metric([pool, metric, "0.5"], found.p50_ratio)
            ratio.add_metric([pool, metric, "0.9"], found.p90_ratio)
            bias.add_metric([pool, metric], found.bias)
            count.add_metric([pool, metric], found.count)
        return [error, ratio, bias, count]

    def finished(self, record: RequestRecord, rule: str | None = None) -> None:
        """Count one ended request. ``rule``: the one that it was decided by, if any."""
        if record.reason:
            self.decisions.labels(record.pool or "", record.reason, rule or "").inc()
        pool = record.pool or ""
        code = record.error_code or ""
        if record.reason == Reason.SPILL and record.outcome == "ok":
            self.spilled.labels(pool).inc()
        self.requests.labels(pool, record.outcome, code if not code or code in _CODES else "other").inc()
        if record.ttft_ms is not None:
            self.ttft.labels(pool).observe(record.ttft_ms / 1000)
        if record.tpot_ms is not None:
            self.tpot.labels(pool).observe(record.tpot_ms / 1000)
        if record.itl_p99_ms is not None:
            self.itl_p99.labels(pool).observe(record.itl_p99_ms / 1000)
        self.total.labels(pool).observe(record.total_ms / 1000)
        self.queued.labels(pool).observe(record.queued_ms / 1000)
        if record.handoff_ms is not None:
            self.handoff.labels(pool).observe(record.handoff_ms / 1000)
        if record.kv_bytes:
            self.handoff_bytes.labels(pool).inc(record.kv_bytes)
        for kind, count in (("prompt", record.prompt_tokens), ("completion", record.completion_tokens)):
            kind += "_estimated" if f"{kind}_tokens" in record.estimated else ""
            self.tokens.labels(pool, kind).inc(count)

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)
