"""What all requests of one router share."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdhub.api.request import RequestRecord
from pdhub.config.build import Plan
from pdhub.router.caches import Caches
from pdhub.router.caller import Caller
from pdhub.router.fleet import Fleet, sampling_defaults
from pdhub.router.flight import Flight
from pdhub.router.gate import Gate
from pdhub.router.generation import Generation
from pdhub.router.janitor import Janitor
from pdhub.router.leftovers import Leftovers
from pdhub.router.lines import Lines
from pdhub.router.parsing import Parsing
from pdhub.router.presentation import TextDecoder
from pdhub.router.recycle import Recycler
from pdhub.router.rulebook import Rulebook
from pdhub.telemetry.decisions import DecisionLog
from pdhub.telemetry.observer import Observer
from pdhub.telemetry.router import RouterMetrics

KEPT_RECORDS = 256


class OpenRequests:
    """Counts requests that have not ended."""

    def __init__(self) -> None:
        self.count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self.count += 1
        self._none.clear()

    def __exit__(self, *exc: object) -> None:
        self.count -= 1
        if not self.count:
            self._none.set()

    async def none(self) -> None:
        """Until there is none."""
        await self._none.wait()


@dataclass(slots=True)
class Context:
    """Made once by the server.

    Args:
        plan, rules: replaced together by a reload; a request reads its own ``flight.rules``.
        gate: in front of pools. lines: in front of prefill instances.
    text: None if no pool speaks tokens. observer: None if nobody observes. clock: monotonic seconds.
        generation: what the model's files say, for pools that speak tokens.
        parsing: of reasoning and tool calls, for them too. recycler: of nodes that hold KV for nobody.
    requests: how many have not ended. draining: the router refuses new ones.
        records: the last ended requests, for ``/debug/requests``.
    """

    plan: Plan
    fleet: Fleet
    rules: Rulebook
    caller: Caller
    gate: Gate
    lines: Lines
    janitor: Janitor
    metrics: RouterMetrics
    text: TextDecoder | None
    observer: Observer[RequestRecord] | None
    clock: Callable[[], float]
    recycler: Recycler
    generation: Generation = field(default_factory=Generation)
    parsing: Parsing = field(default_factory=Parsing)
    decisions: DecisionLog = field(default_factory=DecisionLog)
    caches: Caches = field(default_factory=Caches)
    leftovers: Leftovers = field(default_factory=lambda: Leftovers(time.monotonic))
    requests: OpenRequests = field(default_factory=OpenRequests)
    draining: bool = False
    rng: random.Random = field(default_factory=random.Random)
    records: deque[RequestRecord] = field(default_factory=lambda: deque(maxlen=KEPT_RECORDS))

    def sampling_defaults(self) -> Mapping[str, float]:
        """Of members that a client omits: the configuration's, else what a prefill instance tells, else the model's."""
        configured = self.plan.config.model.sampling_defaults
        if configured is not None:
            return {str(name): value for name, value in configured.items()}
        return sampling_defaults(self.fleet) or self.generation.sampling

    def shown(self, flight: Flight) -> Mapping[str, str]:
        """The router's own response headers."""
        out = {"x-request-id": flight.shown_id}
        if self.plan.config.router.debug_headers:
            decision = flight.decision
            known = {
                "x-pdhub-pool": flight.pool,
                "x-pdhub-node": flight.node,
                "x-pdhub-prefill": flight.prefill,
                "x-pdhub-reason": flight.reason,
                "x-pdhub-policy": decision.policy if decision else None,
                "x-pdhub-rule": decision.rule if decision else None,
                "x-pdhub-policy-version": flight.rules.version,
                "x-pdhub-predicted-ttft-ms": _millis(flight.predicted.ttft_ms),
                "x-pdhub-predicted-tpot-ms": _millis(flight.predicted.tpot_ms),
            }
            out |= {name: value for name, value in known.items() if value}
        return out


def _millis(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}".rstrip("0").rstrip(".")
