"""Numbers of an embedded prefill instance, for ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class PrefillMetrics:
    """One registry an instance, so that several can live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "pdhub_prefill_requests", "Requests by how they ended.", ["outcome"], registry=self._registry
        )
        self._seconds = Histogram(
            "pdhub_prefill_request_seconds", "Arrival to answer.", buckets=_SECONDS, registry=self._registry
        )
        self.handoffs = Counter(
            "pdhub_prefill_handoffs", "Hand-overs after the answer, by outcome.", ["outcome"], registry=self._registry
        )
        self.prompt_tokens = Counter("pdhub_prefill_prompt_tokens", "Tokens computed.", registry=self._registry)
        self.kv_bytes = Counter("pdhub_prefill_kv_bytes", "KV bytes posted to nodes.", registry=self._registry)
        self.stalls = Counter(
            "pdhub_prefill_stalls", "Chunks that had to wait for a staging slot.", registry=self._registry
        )

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when somebody asks."""
        Gauge(f"pdhub_prefill_{name}", help_text, registry=self._registry).set_function(read)

    def ended(self, outcome: str, seconds: float) -> None:
        """A request ended."""
        self._requests.labels(outcome).inc()
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)
