"""The ``policy`` section: service classes, tenants, and how requests are routed."""

from __future__ import annotations

from datetime import time
from typing import Annotated, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, StringConstraints, field_validator, model_validator

from pdhub.api.request import Feature
from pdhub.config.base import Component, Model, Name
from pdhub.core.slo import KEY_HEADERS
from pdhub.core.slo_classes import PRESETS

ClassName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_./-]{0,62}$")]
Millis = Annotated[float, Field(gt=0, le=86_400_000, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Bound = Annotated[float, Field(allow_inf_nan=False)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]
Clock = Annotated[str, StringConstraints(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
Tier = Literal["default", "flex", "priority", "scale"]

SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", *KEY_HEADERS})


class FilterConfig(Component):
    """A filter: drops nodes."""

    soft: bool = Field(False, description="Ignored for a request that the filter would leave without any node.")


class ScorerConfig(Component):
    """A scorer: rates nodes between 0 and 1."""

    weight: Weight = Field(1.0, description="Its share of the weighted mean.")


class SLOClass(Model):
    """A named service class: what its requests are promised, and how important they are."""

    preset: str | None = Field(
        None,
        description="Ready-made class that gives the targets left out, such as `mlperf/llama2-70b-interactive`.",
    )
    ttft_ms: Millis | None = Field(None, description="Target for the time to the first token, in milliseconds.")
    tpot_ms: Millis | None = Field(None, description="Target for the time of an output token, in milliseconds.")
    priority: int | None = Field(
        None,
        ge=-1000,
        le=1000,
        description="Higher is more important, negative may be shed; 1 for tier `priority`, -1 for `flex`, else 0.",
    )
    service_tier: Tier | None = Field(None, description="OpenAI `service_tier` that asks for this class.")

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"there is no preset '{self.preset}'; there are: {', '.join(PRESETS)}")
        return self


class TenantConfig(Model):
    """Who sends requests, and how much of what they ask for is granted."""

    api_key_sha256: list[Digest] = Field(
        default_factory=list,
        description="SHA-256 (hex) of API keys that prove this tenant. Without one the fairness header alone names it.",
    )
    trust: Literal["full", "clamp", "strip"] | None = Field(
        None,
        description="`full`: gets what it asks for. `clamp`: targets and priority no better than those of `max_class`. "
        "`strip`: what it asks for is ignored, its `default_class` counts. "
        "Default: `clamp` with a `max_class`, else `full`.",
    )
    max_class: ClassName | None = Field(None, description="The best class that it may have.")
    default_class: ClassName | None = Field(None, description="Class of requests that name none; else the policy's.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.trust == "clamp" and self.max_class is None:
            raise ValueError("trust: clamp needs a max_class")
        if self.trust in ("full", "strip") and self.max_class is not None:
            raise ValueError(f"max_class means nothing with trust: {self.trust}")
        return self


class RangeConfig(Model):
    """Numbers from `at_least`, inclusive, to `below`, exclusive. A value that is not there is in no range."""

    at_least: Bound | None = Field(None, description="Smallest value inside.")
    below: Bound | None = Field(None, description="Smallest value that is outside again.")

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.at_least is None and self.below is None:
            raise ValueError("a range needs at_least, below or both")
        if self.at_least is not None and self.below is not None and self.at_least >= self.below:
            raise ValueError("at_least must be smaller than below")
        return self


class WindowConfig(Model):
    """A time of the day. An end at or before the start is on the next day."""

    days: list[Day] = Field(default_factory=list, description="Days on which it starts; empty = all.")
    start: Clock = Field("00:00", description="First minute inside, HH:MM.")
    end: Clock = Field("00:00", description="First minute outside, HH:MM.")
    zone: str = Field("UTC", description="IANA time zone, such as Europe/Berlin.")

    @field_validator("zone")
    @classmethod
    def _zone(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"there is no time zone '{value}' on this machine") from None
        return value

    def bounds(self) -> tuple[time, time]:
        """Start and end."""
        return time.fromisoformat(self.start), time.fromisoformat(self.end)


class MatchConfig(Model):
    """What a request must be; all that is given must hold. Texts are patterns with `*`, `?` and `[…]`."""

    model: list[str] = Field(default_factory=list, description="Served model, one of these.")
    endpoint: list[str] = Field(default_factory=list, description="Path, one of these: `/v1/chat/completions` …")
    tenant: list[str] = Field(default_factory=list, description="Tenant, one of these.")
    slo_class: list[str] = Field(default_factory=list, description="Service class, one of these.")
    headers: dict[str, str] = Field(
        default_factory=dict, description="Header → pattern of its value; `*` = it was sent. Not for credentials."
    )
    stream: bool | None = Field(None, description="Whether the answer is a stream.")
    has_slo: bool | None = Field(None, description="Whether the request has any target.")
    ttft_ms: RangeConfig | None = Field(None, description="Target for the time to the first token.")
    tpot_ms: RangeConfig | None = Field(None, description="Target for the time of an output token.")
    prompt_tokens: RangeConfig | None = Field(None, description="Estimated length of the prompt.")
    max_tokens: RangeConfig | None = Field(None, description="The client's cap on the answer; no cap is in no range.")
    priority: RangeConfig | None = Field(None, description="Priority; higher is more important.")
    features: list[Feature] = Field(default_factory=list, description="The request needs all of these of an engine.")
    without: list[Feature] = Field(default_factory=list, description="The request needs none of these.")
    time: list[WindowConfig] = Field(default_factory=list, description="It arrived in one of these windows.")

    @field_validator("headers")
    @classmethod
    def _no_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        lowered = {name.lower(): pattern for name, pattern in value.items()}
        if secret := sorted(SECRET_HEADERS & lowered.keys()):
            raise ValueError(f"rules may not look at {secret[0]}: credentials name a tenant, see tenants")
        return lowered


class Rule(Model):
    """The first rule that matches a request says where it may go; without a match the base policy sees all pools."""

    name: Name = Field(description="Name in decisions and logs.")
    match: MatchConfig = Field(default_factory=MatchConfig, description="Which requests; empty = all.")
    pools: list[Name] = Field(
        default_factory=list,
        description="Pools in order; with `scorers` a set. Empty = all. The policy chooses the node.",
    )
    weights: dict[Name, Weight] = Field(
        default_factory=dict, description="Instead of `pools`: shares, as for a canary. 0 takes a pool out."
    )
    sticky: Literal["request", "session", "tenant"] = Field(
        "request", description="What the draw of `weights` goes by: one session or tenant always draws the same pool."
    )
    scorers: list[ScorerConfig] = Field(
        default_factory=list, description="Rank all nodes of the pools together, instead of the base policy."
    )
    filters: list[FilterConfig] = Field(default_factory=list, description="Filters beside those of the policy.")
    fallback: list[Name] | None = Field(
        None, description="Pools behind these, in order. Default: all others. `[]` = none: rather refuse."
    )

    @model_validator(mode="after")
    def _useful(self) -> Self:
        if self.pools and self.weights:
            raise ValueError("a rule has pools or weights, not both")
        if self.weights and self.scorers:
            raise ValueError("a rule has weights or scorers, not both")
        if self.weights and not sum(self.weights.values()):
            raise ValueError("at least one weight must be above 0")
        if len(set(self.pools)) < len(self.pools):
            raise ValueError("a pool is named twice")
        if not (self.pools or self.weights or self.scorers or self.filters or self.fallback is not None):
            raise ValueError("the rule says nothing: give it pools, weights, scorers or filters")
        return self


class RoutingConfig(Component):
    """The base policy (`type`, `config`) and what stands around it."""

    rules: list[Rule] = Field(default_factory=list, description="In order; the first that matches counts.")
    filters: list[FilterConfig] = Field(default_factory=list, description="Drop nodes before anybody chooses.")
    scorers: list[ScorerConfig] = Field(
        default_factory=list, description="Rank the nodes within each pool; the base policy still orders the pools."
    )
    fallback: list[Name] = Field(
        default_factory=list,
        description="Pools held in reserve: used, in order, when no other pool can take a request.",
    )


class PolicyConfig(RoutingConfig):
    """Routing, service classes and tenants. `policy: {type: slo}` is a whole policy."""

    slo_classes: dict[ClassName, SLOClass] = Field(
        default_factory=dict, description="Service classes by name; clients name one in `x-pdhub-slo-class`."
    )
    default_class: ClassName | None = Field(None, description="Class of requests that name none.")
    strict: bool = Field(False, description="A target, class or tier that cannot be read is a 400, not 'no target'.")
    tenants: dict[Name, TenantConfig] = Field(
        default_factory=dict, description="Tenants by name. Without any, every client is believed."
    )
    default_tenant: Name = Field("default-flow", description="Tenant of requests that no tenant is known for.")
    prefill: Component = Field(
        default_factory=lambda: Component(type="prefill"),
        description="Policy that chooses the prefill instance; it sees instances where others see nodes.",
    )
    shadow: RoutingConfig | None = Field(
        None, description="Another routing that is asked for every request; what it would have done is only logged."
    )
