"""What one request asks for: latency targets, priority, tenant, session and service tier, out of headers and body.

Names and meanings are those of llm-d, Gateway API inference extension, Dynamo, SMG, vLLM and OpenAI; each system's
polarity of priority is turned into one here: higher is more important, negative may be shed. For each metric the
first *present* name wins; present but unreadable means no target, it does not fall through to the next name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Final

from pdhub.api.policy import Reason
from pdhub.api.request import SLO
from pdhub.core.slo_classes import Classes, ServiceClass, Tenant, Trust
from pdhub.core.slo_values import clean, integer, milliseconds, parse_ms

TTFT: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "ttft_target")
TPOT: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms", "itl_target")
"""Two headers and a member of ``extra_args``."""
CLASS: Final = "x-pdhub-slo-class"
OBJECTIVE: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
SMG: Final = "x-smg-priority"
KEY_HEADERS: Final = ("api-key", "x-api-key")
"""Where some clients put the API key instead of ``Authorization: Bearer``."""
SESSION: Final = ("x-session-id", "x-session-token")

SMG_PRIORITY: Final = {"system": 2, "interactive": 1, "default": 0, "bulk": -1}
TIERS: Final = frozenset({"auto", "default", "flex", "priority", "scale"})
TIER_PRIORITY: Final = {"priority": 1, "flex": -1}
"""Of a tier without a class."""

_STRENGTH: Final = ("none", "default", "class", "body", "header")
_MISSED: Final = frozenset({Reason.SLO_LEAST_MISS, Reason.FALLBACK, Reason.SPILL})


@dataclass(frozen=True, slots=True)
class SloReading:
    """Args:
    objective: name of the inference objective that the client gave; empty if none.
    tier: service tier to serve it as; None = the client named none, so the answer says nothing.
    session: conversation that the client names; empty if none.
    invalid: names that were present but could not be read, in the order of reading.
    """

    slo: SLO = SLO()
    priority: int = 0
    tenant: str = ""
    objective: str = ""
    tier: str | None = None
    session: str = ""
    invalid: tuple[str, ...] = ()


def read_slo(headers: Mapping[str, str], body: Mapping[str, Any], classes: Classes) -> SloReading:
    """Read one request. Never raises: what cannot be read is no target, and is named in ``invalid``.

    Args:
        headers: lower-cased names, of a repeated header the first. body: the parsed request.
    """
    reader = _Reader(headers, body, classes)
    tenant = reader.tenant()
    session = reader.session()
    if tenant.trust is Trust.STRIP:
        chosen = tenant.default or classes.default
        slo, priority = _of_class(chosen, "default"), chosen.priority if chosen else 0
        tier = None
        if reader.member("service_tier") is not None:
            tier = (chosen.tier if chosen else None) or "default"
        return SloReading(slo, priority, tenant.name, "", tier, session, tuple(reader.invalid))
    asked = reader.asked(tenant)
    if tenant.trust is Trust.CLAMP and tenant.best is not None:
        asked = _clamped(asked, tenant.best)
    return SloReading(
        asked.slo, asked.priority, tenant.name, asked.objective, asked.tier, session, tuple(reader.invalid)
    )


def served_tier(tier: str | None, reason: str) -> str | None:
    """The tier that really served a request.

    Args:
        tier: as read. reason: the decision's. A better tier whose targets could not be kept was an ordinary one.
    """
    return "default" if tier in ("priority", "scale") and reason in _MISSED else tier


@dataclass(frozen=True, slots=True)
class _Asked:
    slo: SLO
    priority: int
    tier: str | None
    objective: str


@dataclass(slots=True)
class _Reader:
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    classes: Classes
    invalid: list[str] = field(default_factory=list)

    def tenant(self) -> Tenant:
        """By API key, else by the fairness header, else the default one."""
        known = self.classes.tenants
        default = known.get(self.classes.default_tenant, Tenant(self.classes.default_tenant))
        if self.classes.keys:
            digest = sha256(self._key().encode("utf-8", "surrogatepass")).hexdigest()
            if digest in self.classes.keys:
                return known[self.classes.keys[digest]]
        name = self.first(FAIRNESS)
        if name is None:
            return default
        if (cleaned := clean(name[1])) is None:
            self.invalid.append(name[0])
            return default
        if not known:
            return Tenant(cleaned)
        named = known.get(cleaned)
        return named if named is not None and not named.proven else default

    def _key(self) -> str:
        scheme, _, key = self.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return key.strip()
        found = self.first(KEY_HEADERS)
        return found[1].strip() if found else ""

    def session(self) -> str:
        found = self.first(SESSION)
        text = found[1] if found else self.member("prompt_cache_key")
        if not isinstance(text, str) or not text.strip():
            return ""
        text = text.strip()
        return text if len(text) <= 64 else sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def asked(self, tenant: Tenant) -> _Asked:
        """All that the client asks for, with the defaults of tenant and policy."""
        objective = self._objective()
        tier = self._tier()
        chosen, source = self._class(tier, objective, tenant)
        ttft, ttft_source = self._target(TTFT, chosen.ttft_ms if chosen else None, source)
        tpot, tpot_source = self._target(TPOT, chosen.tpot_ms if chosen else None, source)
        slo = SLO(
            ttft_ms=ttft,
            tpot_ms=tpot,
            slo_class=chosen.name if chosen else None,
            source=max(ttft_source, tpot_source, key=_STRENGTH.index),
        )
        priority = self._priority(objective)
        if priority is None and tier in TIER_PRIORITY and source == "default":
            priority = TIER_PRIORITY[tier]
        if priority is None:
            priority = chosen.priority if chosen else 0
        if tier in ("auto", "scale"):
            tier = (chosen.tier if chosen else None) or "default"
        return _Asked(slo, priority, tier, objective)

    def first(self, names: tuple[str, ...]) -> tuple[str, str] | None:
        """The first header that is present, and its value."""
        return next(((name, self.headers[name]) for name in names if name in self.headers), None)

    def member(self, name: str) -> Any:
        return self.body.get(name)

    def _target(self, names: tuple[str, str, str], default: float | None, source: str) -> tuple[float | None, str]:
        *header_names, member = names
        if (found := self.first(tuple(header_names))) is not None:
            value = parse_ms(found[1])
            if value is None:
                self.invalid.append(found[0])
            return value, "none" if value is None else "header"
        extra = self.member("extra_args")
        if isinstance(extra, Mapping) and extra.get(member) is not None:
            value = milliseconds(extra[member])
            if value is None:
                self.invalid.append(f"extra_args.{member}")
            return value, "none" if value is None else "body"
        return default, "none" if default is None else source

    def _objective(self) -> str:
        found = self.first(OBJECTIVE)
        if found is None:
            return ""
        if (name := clean(found[1])) is None:
            self.invalid.append(found[0])
        return name or ""

    def _tier(self) -> str | None:
        tier = self.member("service_tier")
        if tier is None or (isinstance(tier, str) and tier in TIERS):
            return tier
        self.invalid.append("service_tier")
        return None

    def _class(self, tier: str | None, objective: str, tenant: Tenant) -> tuple[ServiceClass | None, str]:
        """The class and where it comes from."""
        known = self.classes.classes
        if CLASS in self.headers:
            chosen = known.get(self.headers[CLASS].strip())
            if chosen is None:
                self.invalid.append(CLASS)
            return chosen, "class"
        for chosen in (self.classes.of_tier(tier) if tier else None, known.get(objective)):
            if chosen is not None:
                return chosen, "class"
        return tenant.default or self.classes.default, "default"

    def _priority(self, objective: str) -> int | None:
        """What the client says about importance itself; None if nothing."""
        named = self.classes.classes.get(objective)
        if named is not None:
            return named.priority
        if SMG in self.headers:
            return SMG_PRIORITY.get(self.headers[SMG].strip().lower(), 0)
        nvext = self.member("nvext")
        hints = nvext.get("agent_hints") if isinstance(nvext, Mapping) else None
        if isinstance(hints, Mapping):
            for name in ("strict_priority", "priority"):
                if hints.get(name) is not None:
                    return self._number(hints[name], f"nvext.agent_hints.{name}")
        if self.member("priority") is not None:
            value = self._number(self.member("priority"), "priority")
            return None if value is None else -value  # vLLM and LiteLLM: lower is sooner
        return None

    def _number(self, value: Any, name: str) -> int | None:
        number = integer(value)
        if number is None:
            self.invalid.append(name)
        return number


def _of_class(chosen: ServiceClass | None, source: str) -> SLO:
    if chosen is None:
        return SLO()
    given = chosen.ttft_ms is not None or chosen.tpot_ms is not None
    return SLO(chosen.ttft_ms, chosen.tpot_ms, chosen.name, source if given else "none")


def _clamped(asked: _Asked, best: ServiceClass) -> _Asked:
    """No target tighter, and no priority higher, than the best class has; without a target there none is granted."""
    slo = asked.slo
    ttft, tpot = _looser(slo.ttft_ms, best.ttft_ms), _looser(slo.tpot_ms, best.tpot_ms)
    priority = min(asked.priority, best.priority)
    cut = (ttft, tpot, priority) != (slo.ttft_ms, slo.tpot_ms, asked.priority)
    slo = replace(
        slo,
        ttft_ms=ttft,
        tpot_ms=tpot,
        slo_class=best.name if cut and slo.slo_class is not None else slo.slo_class,
        source="none" if ttft is None and tpot is None else slo.source,
    )
    tier = "default" if cut and asked.tier in ("priority", "scale") else asked.tier
    return replace(asked, slo=slo, priority=priority, tier=tier)


def _looser(target: float | None, bound: float | None) -> float | None:
    return None if target is None or bound is None else max(target, bound)
