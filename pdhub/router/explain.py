"""What would be decided for a request, and why. Nothing is sent and nothing changes: the policy is pure, and chance
comes from a copy.

:mod:`pdhub.router.live` asks on the fleet as it is, :mod:`pdhub.router.offline` on one made from the configuration.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pdhub.api.client import Bind
from pdhub.api.engine import Capabilities
from pdhub.api.policy import Decision, Reason, Snapshot
from pdhub.api.request import RequestView
from pdhub.config.models import ServedModel
from pdhub.core.slo import SloReading, served_tier
from pdhub.core.slo_classes import Trust
from pdhub.router import sampling as sampling_rules
from pdhub.router.openai import CHAT_PATH, COMPLETIONS_PATH, ClientRequest, parse_request
from pdhub.router.rulebook import Rulebook
from pdhub.router.slo import read_asked
from pdhub.router.view import Seen, view_of
from pdhub.telemetry.decisions import decision_document, request_document


@dataclass(frozen=True, slots=True)
class Door:
    """Where a request would wait.

    Args:
        pool: its door; not the policy's first pool if waiting there would cost the TTFT target. None = refused.
        ahead: requests that wait there and would enter before it. wait_ms: until it would enter; None = unknown.
        refused: why it would not even wait; empty if it would.
    """

    pool: str | None
    ahead: int = 0
    wait_ms: float | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Handoff:
    """How the chosen node would get its KV.

    Args:
        bind: ``early``: the node is settled before prefill, which may send while it computes. ``late``: it is chosen
            again afterwards, from how things are then.
        prefill: the instance that computes the prompt; None = nobody can. reason: why that one, or what is wrong.
        tokens_ahead: prompt tokens that wait for it and have their turn before. wait_ms: until it would be sent there;
            None = unknown.
    """

    bind: Bind
    prefill: str | None
    reason: str
    tokens_ahead: int = 0
    wait_ms: float | None = None


class World(ABC):
    """What a decision depends on beside the request.

    Args:
        reasons: every chat answer has reasoning that must be split off.
        defaults: the model's sampling defaults. now: monotonic seconds. wall_s: the same moment in epoch seconds.
        seen: as in :func:`~pdhub.router.view.view_of`. assumed: what is taken for granted, in words.
    """

    model: ServedModel
    rules: Rulebook
    reasons: bool = False
    defaults: Mapping[str, float]
    now: float
    wall_s: float | None
    rng: random.Random
    seen: Seen | None = None
    assumed: Sequence[str] = ()

    def cached(self, request: ClientRequest) -> Mapping[str, float]:
        """What engines tell of their caches, as :attr:`RequestView.cached`. Default: nothing."""
        return {}

    @abstractmethod
    def capabilities(self) -> list[Capabilities]:
        """Of each pool."""

    @abstractmethod
    def snapshot(self, request: RequestView, asked: SloReading) -> Snapshot:
        """As this request would find it."""

    @abstractmethod
    def door(self, decision: Decision) -> Door | None:
        """Where the request of the last snapshot would wait; None = unknown here."""

    @abstractmethod
    def handoff(self, request: RequestView, pool: str, node: str) -> Handoff | None:
        """None: the engine prefills itself."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Args:
    shadow: what the shadow policy would have decided; None if there is none.
    trust: how much of what this tenant asks for is granted.
    """

    request: RequestView
    asked: SloReading
    decision: Decision
    version: str
    trust: Trust
    shadow: Decision | None
    door: Door | None
    handoff: Handoff | None
    assumed: Sequence[str]

    @property
    def place(self) -> tuple[str | None, str | None, Reason]:
        """Pool, node and reason: the policy's choice, but for a request that its pool's queue would turn away."""
        decision, door = self.decision, self.door
        if door is None or door.pool == decision.pool:
            return decision.pool, decision.node, decision.reason
        if door.pool is None:
            return None, None, Reason.SHED
        node = next(node for pool, node in decision.order if pool == door.pool)
        return door.pool, node, Reason.SPILL

    def document(self) -> dict[str, Any]:
        """The JSON of ``POST /explain`` and of ``pdhub explain --json``."""
        shadow = None
        if self.shadow is not None:
            shadow = decision_document(self.shadow)
            del shadow["candidates"]
        pool, node, reason = self.place
        return {
            **decision_document(self.decision),
            "pool": pool,
            "node": node,
            "reason": reason.value,
            "version": self.version,
            "trust": self.trust.value,
            "tier": served_tier(self.asked.tier, reason.value),
            "door": None if self.door is None else msgspec.to_builtins(self.door),
            "handoff": None if self.handoff is None else msgspec.to_builtins(self.handoff),
            "request": request_document(self.request),
            "invalid": list(self.asked.invalid),
            "shadow": shadow,
            "assumed": list(self.assumed),
        }


def explain(world: World, raw: bytes, headers: Mapping[str, str], *, id: str) -> Explanation:
    """Decide for one request.

    Args:
        raw: the body; with ``messages`` it is a chat completion, else a completion.
        headers: lower-cased names.
        id: the request's id, which ties and draws go by.

    Raises:
        InvalidRequest: the router would refuse it before asking any policy.
    """
    model, rules = world.model, world.rules
    request = parse_request(endpoint_of(raw), raw, model.name, model.aliases, reasons=world.reasons)
    asked = read_asked(headers, request.body, rules.classes, _uncounted)
    view = view_of(
        request,
        asked,
        sampling_rules.resolve(request.body, world.defaults),
        world.capabilities(),
        id=id,
        headers={name: headers[name] for name in rules.headers if name in headers},
        arrived_s=world.now,
        wall_s=world.wall_s,
        seen=world.seen,
        cached=world.cached(request),
    )
    snapshot = world.snapshot(view, asked)
    decision = rules.policy.choose(view, snapshot, world.now, world.rng)
    shadow = rules.policy.shadow
    tenant = rules.classes.tenants.get(asked.tenant)
    found = Explanation(
        request=view,
        asked=asked,
        decision=decision,
        version=rules.version,
        trust=Trust.FULL if tenant is None else tenant.trust,
        shadow=None if shadow is None else shadow.choose(view, snapshot, world.now, world.rng),
        door=world.door(decision) if decision.order else None,
        handoff=None,
        assumed=world.assumed,
    )
    pool, node, _ = found.place
    if pool is None or node is None:
        return found
    return replace(found, handoff=world.handoff(view, pool, node))


def endpoint_of(raw: bytes) -> str:
    """A body with ``messages`` is a chat completion; whatever is wrong with it is said by who parses it."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return COMPLETIONS_PATH
    return CHAT_PATH if isinstance(body, dict) and "messages" in body else COMPLETIONS_PATH


def _uncounted(name: str) -> None:
    """A question is no traffic."""
