"""Prometheus metrics of a node: one registry a server, so that several can live in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

HANDOFF_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds."""

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class NodeMetrics:
    """Counters that the host raises as things happen, gauges that it sets when asked for :meth:`render`."""

    def __init__(self, node: str) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("node", *labels), registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, ("node", *labels), registry=self.registry)

        self._node = node
        self._leases = gauge("pdhub_leases", "Live leases by state.", "state")
        self._free = {
            "landings": gauge("pdhub_landings_free", "Landings that can be claimed.").labels(node),
            "slots": gauge("pdhub_slots_free", "Decode slots that nobody holds.").labels(node),
            "quarantined": gauge("pdhub_quarantined", "Landings withheld until no write can hit them.").labels(node),
            "waiting": gauge("pdhub_slot_waiters", "Requests whose KV is complete and that wait for a slot.").labels(
                node
            ),
            "connections": gauge("pdhub_control_connections", "Senders connected.").labels(node),
        }
        self.kv_bytes = counter("pdhub_kv_bytes", "KV bytes received.").labels(node)
        self.handoff = Histogram(
            "pdhub_handoff_seconds",
            "First writer's join to complete KV.",
            ("node",),
            buckets=HANDOFF_BUCKETS,
            registry=self.registry,
        ).labels(node)
        self.tokens = counter("pdhub_tokens", "Tokens streamed.").labels(node)
        self.digest_failures = counter("pdhub_digest_failures", "Hand-overs whose digest differs.").labels(node)
        self.fences = counter("pdhub_fences", "Landings fenced.", "ok")
        self._refusals = counter("pdhub_refusals", "Claims and joins refused.", "code")
        self._requests = counter("pdhub_requests", "Decode requests by outcome.", "outcome")

    def refused(self, code: str) -> None:
        """A claim or a join got no; ``code`` is from a closed set."""
        self._refusals.labels(self._node, code).inc()

    def ended(self, outcome: str) -> None:
        """A decode request ended: ``ok`` or an error code."""
        self._requests.labels(self._node, outcome).inc()

    def fenced(self, ok: bool) -> None:
        """A fence answered."""
        self.fences.labels(self._node, str(ok).lower()).inc()

    def render(self, leases: Mapping[str, int], now: Mapping[str, int]) -> bytes:
        """Prometheus text.

        Args:
            leases: live ones by state.
            now: readings of ``landings``, ``slots`` (free ones), ``quarantined``, ``waiting``, ``connections``.
        """
        for state, count in leases.items():
            self._leases.labels(self._node, state).set(count)
        for name, value in now.items():
            self._free[name].set(value)
        return generate_latest(self.registry)
