"""One request under virtual time."""

from __future__ import annotations

from dataclasses import replace

from pdhub.api.policy import Snapshot
from pdhub.api.request import RequestView
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
