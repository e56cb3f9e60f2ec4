"""A request's stay on a node: what policies see of it while it lasts, and what the latency model learns from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pdhub.api.policy import Prediction
from pdhub.api.request import RequestView
from pdhub.core.latency import PREFILL, LatencyModel, Sample

if TYPE_CHECKING:
    from pdhub.router.endpoint import Endpoint
    from pdhub.router.fleet import Fleet
    from pdhub.router.flight import Flight

SEGMENT_S = 0.5
SEGMENT_TOKENS = 64
LEAST_TOKENS = 4
"""TPOT is learned while tokens come, from pieces of so many seconds or tokens: an answer may take minutes."""

LEAST_S = 0.01
"""Tokens that came in one piece say nothing about time."""

UNCERTAIN = 3.0
"""An answer in one piece that takes so many times what was expected is overdue."""

UNTOLD_TOKENS = 16
"""An answer that came as one document says something of its TPOT if it is at least that long."""


class Stay:
    """From sending a request to a node until its end there.

    Args:
        predicted: what the model said when the node was chosen; ``predicted.ttft_ms`` counts from now.
        prefill: the instance that computes its prompt; None if the node does.
    """

    def __init__(
        self,
        fleet: Fleet,
        flight: Flight,
        view: RequestView,
        pool: str,
        node: Endpoint,
        prefill: Endpoint | None,
        predicted: Prediction,
        now: float,
    ) -> None:
        self.tpot_target_ms = view.slo.tpot_ms
        self._fleet = fleet
        self._model: LatencyModel = fleet.latency
        self._flight = flight
        self._view = view
        self._pool = pool
        self._node = node
        self._prefill = prefill
        self._predicted = predicted
        self._sent_at = now
        self._pending = [endpoint for endpoint in (node, prefill) if endpoint is not None]
        self._backlog = (prefill or node).pending_tokens
        self._full = bool(node.slots) and node.in_flight >= node.slots
        seen = self._model.seen_tokens(view.prefix, view.prompt_tokens)
        self._seen = None if seen is None else seen / view.prompt_tokens
        self._model.remember(view.prefix)
        self._area = node.area(now)
        self._mark_at, self._mark_tokens, self._mark_area = now, 0, self._area
        self._produced = 0
        flight.stay = self
        flight.sent_at = now
        flight.predicted = predicted
        flight.concurrency = node.in_flight + 1
        node.stays[flight.id] = self
        for endpoint in self._pending:
            endpoint.pending_tokens += view.prompt_tokens
        node.count(+1, now)
        self._model.begin(pool, node.name, flight.id, now + self._first_sign_s())
        fleet.changed(*self._pending)

    def _owed_at(self, now: float) -> float:
        """When its first sign of life is due of whoever has it from now on."""
        ttft, wait = self._predicted.ttft_ms or 0.0, self._predicted.wait_ms or 0.0
        # Where prefill took longer than all was to take, what comes after it may still be as late as it is at times.
        late = self._model.latest_ms(self._pool, ttft) - ttft
        return max(self._sent_at + self._first_sign_s(), now + (wait + late) / 1000)

    def _first_sign_s(self) -> float:
        """When something should be heard of it. A foreign engine says nothing of an answer in one piece before its
        end, and how long that will be is uncertain."""
        ttft, tpot = self._predicted.ttft_ms, self._predicted.tpot_ms
        if self._view.stream or self._node.hosted:
            return self._model.latest_ms(self._pool, ttft) / 1000
        tokens = self.remaining()
        if ttft is None or tpot is None or tokens is None:
            return math.inf
        return (ttft + UNCERTAIN * tokens * tpot) / 1000

    def remaining(self) -> float | None:
        """Tokens that it may still produce; None = unknown."""
        return self._model.remaining(self._pool, self._produced, self._view.max_tokens)

    def prefilling(self, now: float) -> None:
        """The node has nothing to do until the prefill instance has answered: what is late now is not its fault."""
        if self._prefill is not None:
            self._model.end(self._pool, self._node.name, self._flight.id)
            self._model.begin(PREFILL, self._prefill.name, self._flight.id, self._owed_at(now))

    def prefilled(self, sent_at: float, prompt_tokens: int, cached_tokens: int | None, now: float) -> None:
        """The prefill instance answered a call that was sent at ``sent_at``."""
        if self._prefill is not None:
            self._model.observe(
                Sample(
                    PREFILL,
                    self._prefill.name,
                    now,
                    prompt_tokens=prompt_tokens,
                    cached_tokens=cached_tokens,
                    seen_tokens=self._seen_of(prompt_tokens),
                    backlog_tokens=self._backlog,
                    ttft_ms=(now - sent_at) * 1000,
                )
            )
            self._answered(self._prefill)
            self._model.end(PREFILL, self._prefill.name, self._flight.id)
            self._model.begin(self._pool, self._node.name, self._flight.id, self._owed_at(now))
        self._flight.cached_tokens = cached_tokens

    def leave(self, now: float) -> None:
        """For a moment it is on no node: where it decodes is being chosen again, and it must not count against the
        node that it has. Nothing may wait before :meth:`join`."""
        node = self._node
        node.stays.pop(self._flight.id, None)
        self._answered(node)
        node.count(-1, now)
        self._model.end(self._pool, node.name, self._flight.id)
        self._fleet.changed(node)

    def join(self, node: Endpoint, now: float) -> None:
        """It decodes there, another one of its pool or the same again."""
        self._node = node
        self._full = bool(node.slots) and node.in_flight >= node.slots
        self._area = node.area(now)
        self._mark_at, self._mark_area = now, self._area
        node.stays[self._flight.id] = self
        self._flight.concurrency = node.in_flight + 1
        node.count(+1, now)
        self._model.begin(self._pool, node.name, self._flight.id, self._owed_at(now))
        self._fleet.changed(node)

    def tokens(self, count: int, now: float) -> None:
        """``count`` tokens of it came."""
        self._model.progress(self._pool, self._node.name, self._flight.id, now)
        self._produced += count
        if self._produced == count:
            self._first(now)
            self._mark_at, self._mark_tokens, self._mark_area = now, count, self._node.area(now)
            self._fleet.moved(self._node)
            return
        elapsed, tokens = now - self._mark_at, self._produced - self._mark_tokens
        if (elapsed >= SEGMENT_S and tokens >= LEAST_TOKENS) or (tokens >= SEGMENT_TOKENS and elapsed >= LEAST_S):
            self._segment(tokens, elapsed, now)
        self._fleet.moved(self._node)

    def end(self, ok: bool, now: float) -> None:
        """It is over. ``ok``: the engine came to the end of the answer."""
        flight, node, model = self._flight, self._node, self._model
        node.stays.pop(flight.id, None)
        left = [node, *self._pending]
        for endpoint in tuple(self._pending):
            self._answered(endpoint)
        node.count(-1, now)
        model.end(self._pool, node.name, flight.id)
        if self._prefill is not None:
            model.end(PREFILL, self._prefill.name, flight.id)
        if ok:
            self._learn_end(now)
        flight.stay = None
        self._fleet.changed(*left)

    def _answered(self, endpoint: Endpoint) -> None:
        if endpoint in self._pending:
            self._pending.remove(endpoint)
            endpoint.pending_tokens -= self._view.prompt_tokens
            self._fleet.changed(endpoint)

    def _first(self, now: float) -> None:
        for endpoint in tuple(self._pending):
            self._answered(endpoint)
        total = (now - self._sent_at) * 1000
        self._model.compare(self._pool, "ttft", self._predicted.ttft_ms, total)
        wait = self._flight.stats.get("wait_ms")
        if wait is not None or not self._full:  # else part of it was a wait that nobody measured
            self._observe(now, ttft_ms=total - (wait or 0.0), running=1.0)

    def _segment(self, tokens: int, elapsed: float, now: float) -> None:
        area = self._node.area(now)
        self._observe(now, tpot_ms=elapsed * 1000 / tokens, running=(area - self._mark_area) / elapsed)
        self._mark_at, self._mark_tokens, self._mark_area = now, self._produced, area

    def _learn_end(self, now: float) -> None:
        flight = self._flight
        tokens = max(self._produced, flight.completion_tokens)
        self._model.observe(Sample(self._pool, self._node.name, now, output_tokens=tokens))
        if flight.first_at is not None and flight.last_at is not None:
            if tokens > LEAST_TOKENS:
                whole = (flight.last_at - flight.first_at) * 1000 / (tokens - 1)
                self._model.compare(self._pool, "tpot", self._predicted.tpot_ms, whole)
            elapsed, rest = flight.last_at - self._mark_at, self._produced - self._mark_tokens
            if rest >= LEAST_TOKENS and elapsed >= LEAST_S:
                self._segment(rest, elapsed, now)
        elif tokens >= UNTOLD_TOKENS and self._predicted.ttft_ms is not None:
            decode = (now - self._sent_at) * 1000 - self._predicted.ttft_ms
            running = (self._node.area(now) - self._area) / max(1e-9, now - self._sent_at)
            self._observe(now, tpot_ms=decode / tokens, running=running)

    def _seen_of(self, prompt_tokens: int) -> int | None:
        return None if self._seen is None else int(self._seen * prompt_tokens)

    def _observe(
        self, now: float, *, running: float, ttft_ms: float | None = None, tpot_ms: float | None = None
    ) -> None:
        node, prompt = self._node, self._flight.prompt_tokens or self._view.prompt_tokens
        running = max(1.0, running, float(node.load.running or 0) if tpot_ms is not None else 0.0)
        self._model.observe(
            Sample(
                self._pool,
                node.name,
                now,
                prompt_tokens=prompt,
                cached_tokens=self._flight.cached_tokens,
                seen_tokens=self._seen_of(prompt),
                backlog_tokens=self._backlog,
                ttft_ms=ttft_ms,
                tpot_ms=tpot_ms,
                running=min(running, node.slots) if node.slots else running,
                context_tokens=prompt + self._produced,
            )
        )
