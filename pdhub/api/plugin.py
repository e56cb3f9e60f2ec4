"""Specs: what a plugin registers. Light by rule: importing the module that makes specs must not import torch,
vllm or a native library; the factories do that when called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from pdhub.api.client import EngineClient
from pdhub.api.command import Command
from pdhub.api.discovery import Discovery
from pdhub.api.engine import Capabilities, DecodeEngine, EngineContext
from pdhub.api.launcher import Launcher
from pdhub.api.operate import Finding, Operate
from pdhub.api.parser import ParserContext, ParserFactory
from pdhub.api.policy import AdmissionOrder, Filter, Policy, Scorer
from pdhub.api.prefill import PrefillEngine
from pdhub.api.request import Feature
from pdhub.api.transport import Transport

API_VERSION = (1, 0)
"""Major: plugins must match. Minor: a plugin may need at most the host's."""


class Stability(StrEnum):
    ALPHA = "alpha"
    BETA = "beta"
    STABLE = "stable"


class PluginConfig(BaseModel):
    """Base of every plugin's own options: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NoConfig(PluginConfig):
    """For plugins without options."""


@dataclass(frozen=True, kw_only=True)
class PluginSpec:
    """What all kinds share.

    Args:
        name: unique in its kind; what ``type:`` says in YAML. Lower case, digits, ``_`` and ``-``.
        summary: one line for ``pdhub plugins``.
        config: model of the options; every field has a description.
        stability: ``alpha`` may change in a minor release.
        api_version: the (major, minor) of :data:`API_VERSION` that it was written for.
    """

    kind: ClassVar[str] = "plugin"

    name: str
    summary: str
    config: type[BaseModel] = NoConfig
    stability: Stability = Stability.ALPHA
    api_version: tuple[int, int] = API_VERSION


@dataclass(frozen=True, kw_only=True)
class EngineSpec(PluginSpec):
    """An engine: any of four facets.

    Args:
        client: router side; None with a runtime = the host's built-in node client.
        runtime: node side, hosted by ``pdhub node``.
        prefill: embedded prefill instance, hosted by ``pdhub node``.
        operate: deployment side.
        declares: what a node with these options can do, as far as that is known without starting one; ``slots`` are
            one node's. For looking ahead (``pdhub explain``), never for routing: there a node speaks for itself.
    """

    kind: ClassVar[str] = "engine"

    client: Callable[[Any], EngineClient] | None = None
    runtime: Callable[[Any, EngineContext], DecodeEngine] | None = None
    prefill: Callable[[Any, EngineContext], PrefillEngine] | None = None
    operate: Callable[[Any], Operate] | None = None
    declares: Callable[[Any], Capabilities] | None = None


@dataclass(frozen=True, kw_only=True)
class TransportSpec(PluginSpec):
    """A KV transport. ``factory(config)`` makes an unopened instance."""

    kind: ClassVar[str] = "transport"

    factory: Callable[[Any], Transport]


class PolicyPart(StrEnum):
    POLICY = "policy"
    FILTER = "filter"
    SCORER = "scorer"
    ADMISSION = "admission"


@dataclass(frozen=True, kw_only=True)
class PolicySpec(PluginSpec):
    """A routing policy, filter, scorer or admission order, as ``part`` says."""

    kind: ClassVar[str] = "policy"

    part: PolicyPart = PolicyPart.POLICY
    factory: Callable[[Any], Policy | Filter | Scorer | AdmissionOrder]


@dataclass(frozen=True, kw_only=True)
class ParserSpec(PluginSpec):
    """A reasoning and tool-call parser.

    Args:
        declares: of ``Feature.TOOLS`` and ``Feature.REASONING``, what pools that speak tokens can do because of it.
        refusals: what is wrong with these options on this machine and in this deployment, without calls to any node.
            Blocking; may start a process that ends by itself. Asked by ``pdhub check`` and by a router before it
            starts: an ``ERROR`` ends both.
        checks: as :meth:`pdhub.api.Operate.checks`: what ``pdhub doctor`` reports beside the refusals.
    """

    kind: ClassVar[str] = "parser"

    factory: Callable[[Any, ParserContext], ParserFactory]
    declares: Callable[[Any], frozenset[Feature]]
    refusals: Callable[[Any, ParserContext], Sequence[Finding]] | None = None
    checks: Callable[[Any, ParserContext], Sequence[Finding]] | None = None


@dataclass(frozen=True, kw_only=True)
class LauncherSpec(PluginSpec):
    """A way to start processes."""

    kind: ClassVar[str] = "launcher"

    factory: Callable[[Any], Launcher]


@dataclass(frozen=True, kw_only=True)
class DiscoverySpec(PluginSpec):
    """A membership source. ``factory(config, pool)`` where pool is the pool's raw configuration."""

    kind: ClassVar[str] = "discovery"

    factory: Callable[[Any, Mapping[str, Any]], Discovery]


@dataclass(frozen=True, kw_only=True)
class CommandSpec(PluginSpec):
    """A command group."""

    kind: ClassVar[str] = "command"

    factory: Callable[[], Command]
