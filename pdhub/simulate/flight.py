"""One request under virtual time."""

from __future__ import annotations

from dataclasses import replace

from pdhub.api.policy import Snapshot
from pdhub.api.request import RequestRecord, RequestView
from pdhub.core.admission import Ticket
from pdhub.simulate.fleet import NodeState, PoolState
from pdhub.simulate.workload import Arrival


class Flight:
    """One request on its way. Times are virtual seconds.

    Args:
        ticket: at the doors of pools. weighed: the same in front of prefill instances, by its prompt.
        line: the prefill instance in front of which it waits, or which was sent its prompt and has not answered.
    """

    __slots__ = (
        "area",
        "backlog",
        "cached",
        "concurrency",
        "deadline",
        "first_s",
        "line",
        "moves",
        "node",
        "pool",
        "predicted_tpot",
        "predicted_ttft",
        "predicted_wait",
        "prefill",
        "queued_s",
        "ready_s",
        "reason",
        "request",
        "sent_s",
        "since_s",
        "snapshot",
        "ticket",
        "turn",
        "view",
        "weighed",
    )  # fmt: skip

    def __init__(self, request: Arrival, view: RequestView, deadline: float, ticket: Ticket, weight: int) -> None:
        self.request = request
        self.view = view
        self.deadline = deadline
        self.ticket = ticket
        self.weighed = replace(ticket, weight=weight)
        self.snapshot: Snapshot | None = None
        self.moves = self.turn = 0
        self.area = 0.0
        self.queued_s = self.since_s = self.sent_s = self.ready_s = 0.0
        self.first_s: float | None = None
        self.pool: PoolState | None = None
        self.node: NodeState | None = None
        self.prefill: str | None = None
        self.line: str | None = None
        self.reason = ""
        self.cached = self.backlog = 0
        self.concurrency = 0
        self.predicted_ttft: float | None = None
        self.predicted_tpot: float | None = None
        self.predicted_wait: float | None = None

    def record(
        self, model: str, outcome: str, error: str | None, ttft: float | None, tpot: float | None, now: float
    ) -> RequestRecord:
        """What is told of it when it has ended. ``ttft``, ``tpot``: milliseconds."""
        request = self.request
        pool, node = self.pool, self.node
        return RequestRecord(
            id=self.view.id,
            model=model,
            pool=pool.name if pool else None,
            node=node.name if node else None,
            prefill=self.prefill,
            reason=self.reason,
            outcome=outcome,
            error_code=error,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=request.output_tokens if outcome == "ok" else 0,
            ttft_ms=ttft,
            tpot_ms=tpot,
            total_ms=(now - request.at_s) * 1000,
            slo=self.view.slo,
            queued_ms=self.queued_s * 1000,
            concurrency=self.concurrency or None,
            predicted_ttft_ms=self.predicted_ttft,
            predicted_tpot_ms=self.predicted_tpot,
            prefix=self.view.prefix,
            priority=self.view.priority,
        )
