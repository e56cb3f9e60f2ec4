"""Service classes and tenants, and the ready-made classes.

The ``mlperf/`` classes are the p99 bounds of MLPerf Inference for large language models, TTFT and TPOT in
milliseconds. Source: https://github.com/mlcommons/inference_policies/blob/master/inference_rules.adoc (table of
datacenter benchmarks; ``server`` is its server scenario, ``interactive`` its interactive one).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

DEFAULT_TENANT: Final = "default-flow"


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """Targets in milliseconds; None = no target. ``tier``: the OpenAI ``service_tier`` that asks for it."""

    name: str
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    priority: int = 0
    tier: str | None = None


class Trust(StrEnum):
    """How much of what a client asks for is granted."""

    FULL = "full"
    CLAMP = "clamp"
    STRIP = "strip"


@dataclass(frozen=True, slots=True)
class Tenant:
    """``best`` bounds what is granted under :attr:`Trust.CLAMP`. ``default``: class of requests that name none.

    Args:
        proven: only an API key proves this tenant; its name alone does not.
    """

    name: str
    trust: Trust = Trust.FULL
    best: ServiceClass | None = None
    default: ServiceClass | None = None
    proven: bool = False


@dataclass(frozen=True, slots=True)
class Classes:
    """Everything that reading a request's targets depends on.

    Args:
        default: class of requests that name none. keys: SHA-256 (hex) of an API key → tenant's name.
        tenants: without any, every client is believed.
    """

    classes: Mapping[str, ServiceClass] = field(default_factory=dict)
    default: ServiceClass | None = None
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    default_tenant: str = DEFAULT_TENANT
    strict: bool = False

    def of_tier(self, tier: str) -> ServiceClass | None:
        """The class that a service tier asks for: one that says so, else one of that name."""
        return next((c for c in self.classes.values() if c.tier == tier), self.classes.get(tier))


_MLPERF: Final = {
    "llama3.1-8b": {"server": (2000.0, 100.0), "interactive": (500.0, 30.0)},
    "llama2-70b": {"server": (2000.0, 200.0), "interactive": (450.0, 40.0)},
    "llama3.1-405b": {"server": (6000.0, 175.0), "interactive": (4500.0, 80.0)},
    "mixtral-8x7b": {"server": (2000.0, 200.0)},
    "deepseek-r1": {"server": (2000.0, 80.0), "interactive": (1500.0, 15.0)},
    "gpt-oss-120b": {"server": (3000.0, 80.0), "interactive": (2000.0, 20.0)},
}

PRESETS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {f"mlperf/{model}-{kind}": bounds for model, kinds in _MLPERF.items() for kind, bounds in kinds.items()}
)
"""Name → (TTFT, TPOT) in milliseconds."""
