"""What would be decided for a request, and why: on the live fleet, or offline on one made from the configuration.

Nothing is sent and nothing changes: the policy is pure, and chance comes from a copy of the router's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pdhub.api.engine import Capabilities
from pdhub.api.policy import Decision, Snapshot
from pdhub.api.request import RequestView
from pdhub.config.models import ServedModel
from pdhub.core.slo import SloReading, served_tier
from pdhub.core.slo_classes import Trust
from pdhub.router import sampling as sampling_rules
from pdhub.router.context import Context
from pdhub.router.fleet import sampling_defaults
from pdhub.router.flight import new_id, safe_id
from pdhub.router.openai import CHAT_PATH, COMPLETIONS_PATH, parse_request
from pdhub.router.rulebook import Rulebook
from pdhub.router.slo import read_asked
from pdhub.router.view import Seen, view_of
from pdhub.telemetry.decisions import decision_document, request_document


@dataclass(frozen=True, slots=True)
class Explanation:
    """Args:
    trust: how much of what this tenant asks for is granted.
    shadow: what the shadow policy would have decided; None if there is none.
    assumed: what was taken for granted, in words.
    """

    request: RequestView
    asked: SloReading
    decision: Decision
    version: str
    trust: str = Trust.FULL.value
    shadow: Decision | None = None
    assumed: Sequence[str] = ()

    def document(self) -> dict[str, Any]:
        """The JSON of ``POST /explain`` and of ``pdhub explain --json``."""
        shadow = None
        if self.shadow is not None:
            shadow = decision_document(self.shadow)
            del shadow["candidates"]
        return {
            **decision_document(self.decision),
            "version": self.version,
            "trust": self.trust,
            "tier": served_tier(self.asked.tier, self.decision.reason.value),
            "request": request_document(self.request),
            "invalid": list(self.asked.invalid),
            "shadow": shadow,
            "assumed": list(self.assumed),
        }


@dataclass(frozen=True, slots=True)
class World:
    """What a decision depends on beside the request.

    Args:
        pools: what each pool can do. defaults: the model's sampling defaults.
        seen: as in :func:`~pdhub.router.view.view_of`.
        now: monotonic seconds. wall_s: the same moment in epoch seconds.
    """

    model: ServedModel
    rules: Rulebook
    snapshot: Snapshot
    pools: Sequence[Capabilities]
    defaults: Mapping[str, float]
    now: float
    wall_s: float | None
    rng: random.Random
    seen: Seen | None = None


def explain(
    world: World, raw: bytes, headers: Mapping[str, str], *, id: str, assumed: Sequence[str] = ()
) -> Explanation:
    """Decide for one request.

    Args:
        raw: the body; with ``messages`` it is a chat completion, else a completion.
        headers: lower-cased names.
        id: the request's id, which ties and draws go by.

    Raises:
        InvalidRequest: the router would refuse it before asking any policy.
    """
    model, rules = world.model, world.rules
    request = parse_request(endpoint_of(raw), raw, model.name, model.aliases)
    asked = read_asked(headers, request.body, rules.classes, _uncounted)
    view = view_of(
        request,
        asked,
        sampling_rules.resolve(request.body, world.defaults),
        world.pools,
        id=id,
        headers={name: headers[name] for name in rules.headers if name in headers},
        arrived_s=world.now,
        wall_s=world.wall_s,
        seen=world.seen,
    )
    decision = rules.policy.choose(view, world.snapshot, world.now, world.rng)
    shadow = rules.policy.shadow
    other = None if shadow is None else shadow.choose(view, world.snapshot, world.now, world.rng)
    tenant = rules.classes.tenants.get(asked.tenant)
    trust = Trust.FULL if tenant is None else tenant.trust
    return Explanation(view, asked, decision, rules.version, trust.value, other, assumed)


def explain_live(context: Context, raw: bytes, headers: Mapping[str, str]) -> Explanation:
    """As :func:`explain`, on what the router sees now. A client's ``x-request-id`` becomes the id."""
    rng = random.Random()
    rng.setstate(context.rng.getstate())
    now = context.clock()
    world = World(
        model=context.plan.config.model,
        rules=context.rules,
        snapshot=context.fleet.snapshot(now),
        pools=[pool.capabilities for pool in context.fleet.pools.values()],
        defaults=sampling_defaults(context.fleet),
        now=now,
        wall_s=time.time(),
        rng=rng,
        seen=context.fleet.latency.seen_tokens,
    )
    return explain(world, raw, headers, id=safe_id(headers.get("x-request-id", "")) or new_id())


def endpoint_of(raw: bytes) -> str:
    """A body with ``messages`` is a chat completion; whatever is wrong with it is said by who parses it."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return COMPLETIONS_PATH
    return CHAT_PATH if isinstance(body, dict) and "messages" in body else COMPLETIONS_PATH


def _uncounted(name: str) -> None:
    """A question is no traffic."""
