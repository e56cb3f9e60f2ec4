"""What the router sees of running requests, and learns from it while they run."""

from __future__ import annotations

from pdhub.core.latency import LatencyModel, Sample
from pdhub.simulate.fleet import NodeState, Picture
from pdhub.simulate.flight import Flight
from pdhub.simulate.workload import Arrival

SEGMENT_S = 0.5
LEAST_TOKENS = 4
"""TPOT is learned while tokens come, from pieces of so many seconds and at least so many tokens, as the router does."""


class Heartbeat:
    """Args:
    latency: learns.
    """

    def __init__(self, picture: Picture, latency: LatencyModel) -> None:
        self._picture = picture
        self._latency = latency

    def heartbeat(self, now: float) -> None:
        """Tokens came from nodes that run something: a sign of life, and now and then a measured TPOT."""
        for pool in self._picture.pools.values():
            for node in pool.nodes.values():
                if node.engine.running:
                    steps = node.engine.steps()
                    if steps >= node.mark_steps + LEAST_TOKENS:
                        self._latency.progress(pool.name, node.name, "", now)
                        if now >= node.mark_s + SEGMENT_S:
                            self._segment(node, steps, now)

    def _segment(self, node: NodeState, steps: float, now: float) -> None:
        elapsed, area = now - node.mark_s, node.area(now)
        running = (area - node.mark_area) / elapsed
        each = elapsed * 1000 / (steps - node.mark_steps)
        for run in node.engine.running:
            if run.begun <= node.mark_steps:
                self._observe(node, run.request, each * run.slow, running, node.engine.produced(run), now)
        node.mark_s, node.mark_steps, node.mark_area = now, steps, area

    def rest(self, flight: Flight, node: NodeState, tpot: float, now: float) -> None:
        """What was not yet learned from this request: since the last mark, or since it began if that was later."""
        assert flight.first_s is not None
        begun = flight.first_s
        since, area = (begun, flight.area) if begun > node.mark_s else (node.mark_s, node.mark_area)
        elapsed = now - since
        tokens = flight.request.output_tokens - 1
        if elapsed * 1000 / tpot >= LEAST_TOKENS:
            running = (node.area(now) - area) / elapsed
            self._observe(node, flight.request, tpot, running, tokens, now)

    def _observe(
        self, node: NodeState, request: Arrival, tpot: float, running: float, produced: int, now: float
    ) -> None:
        self._latency.observe(
            Sample(
                node.pool,
                node.name,
                now,
                prompt_tokens=request.prompt_tokens,
                tpot_ms=tpot,
                running=min(max(1.0, running), node.engine.cost.slots),
                context_tokens=request.prompt_tokens + produced,
            )
        )
