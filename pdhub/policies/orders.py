"""Admission orders: who of those that wait in front of a pool enters next."""

from __future__ import annotations

from pydantic import Field

from pdhub.api.plugin import PluginConfig
from pdhub.api.policy import AdmissionOrder
from pdhub.api.request import RequestView

PRIORITY_DEADLINE = "priority_deadline"
FIFO = "fifo"


class OrderConfig(PluginConfig):
    """Options that the built-in orders share."""

    sheddable_below: int = Field(
        0, ge=-1000, le=1000, description="Requests of a priority below this may be refused in favour of others."
    )


class PriorityDeadline(AdmissionOrder):
    """The more important first; of equals the one whose time to the first token ends first."""

    def __init__(self, config: OrderConfig) -> None:
        self._below = config.sheddable_below

    def rank(self, request: RequestView, deadline: float, now: float) -> tuple[float, ...]:
        return (-float(request.priority), deadline)

    def sheddable(self, request: RequestView) -> bool:
        return request.priority < self._below


class Fifo(PriorityDeadline):
    """As they came: each is a band of its own, so that nobody takes turns."""

    def rank(self, request: RequestView, deadline: float, now: float) -> tuple[float, ...]:
        return (request.arrived_s or now,)
