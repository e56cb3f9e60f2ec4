"""``POST /explain``: a dry run on the fleet as the router sees it now."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

from pdhub.api.client import LegOrder
from pdhub.api.engine import Capabilities
from pdhub.api.errors import AdmissionRejected, LayoutMismatch, Unsupported
from pdhub.api.policy import Decision, Snapshot
from pdhub.api.request import RequestView
from pdhub.core.slo import SloReading
from pdhub.router.context import Context
from pdhub.router.explain import Door, Explanation, Handoff, World, explain
from pdhub.router.flight import Flight, new_id, safe_id
from pdhub.router.line import Line
from pdhub.router.openai import ClientRequest
from pdhub.router.prefills import picture


def explain_live(context: Context, raw: bytes, headers: Mapping[str, str]) -> Explanation:
    """As :func:`~pdhub.router.explain.explain`. A client's ``x-request-id`` becomes the id."""
    id = safe_id(headers.get("x-request-id", "")) or new_id()
    return explain(_Live(context), raw, headers, id=id)


class _Live(World):
    def __init__(self, context: Context) -> None:
        self._context = context
        self._line: Line | None = None
        self.model = context.plan.config.model
        self.rules = context.rules
        self.reasons = context.parsing.reasons
        self.defaults = context.sampling_defaults()
        self.now = context.clock()
        self.wall_s = time.time()
        self.rng = random.Random()
        self.rng.setstate(context.rng.getstate())
        self.seen = context.fleet.latency.seen_tokens

    def cached(self, request: ClientRequest) -> Mapping[str, float]:
        return self._context.caches.shares(request)

    def capabilities(self) -> list[Capabilities]:
        return [pool.capabilities for pool in self._context.fleet.pools.values()]

    def snapshot(self, request: RequestView, asked: SloReading) -> Snapshot:
        flight = Flight(request.id, self.now, self.rules, asked=asked)
        self._line = Line(self._context, flight, request, flight.deadline)
        return self._line.snapshot(self.now)

    def door(self, decision: Decision) -> Door:
        assert self._line is not None, "there was a snapshot before the decision"
        try:
            pool = self._line.door(decision.order)
        except AdmissionRejected as error:
            return Door(None, refused=error.reason or error.code)
        ahead, wait_s = self._line.ahead(pool)
        refused = "" if self._line.opens(pool) else "the queue is full"
        return Door(pool, ahead, None if wait_s is None else wait_s * 1000, refused)

    def handoff(self, request: RequestView, pool: str, node: str) -> Handoff | None:
        context = self._context
        mine = context.fleet.pools[pool]
        if mine.client.order is LegOrder.DECODE_ONLY:
            return None
        try:
            able = context.fleet.able_prefills(mine, mine.nodes[node], request, (), self.now)
        except (LayoutMismatch, Unsupported, AdmissionRejected) as error:
            return Handoff(mine.client.bind, None, error.message)
        assert self._line is not None, "there was a snapshot before the decision"
        ticket = self._line.weighed
        seen = picture(context, request, able, ticket, self.now)
        decision = self.rules.prefill.choose(request, seen, self.now, self.rng)
        if decision.node is None:
            return Handoff(mine.client.bind, None, decision.reason.value)
        ahead = context.lines.tokens_ahead(decision.node, ticket)
        wait_s = context.lines.predicted_wait(decision.node, ticket)
        wait_ms = None if wait_s is None else wait_s * 1000
        return Handoff(mine.client.bind, decision.node, decision.reason.value, ahead, wait_ms)
