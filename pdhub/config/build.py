"""File, environment and flags → a :class:`Plan`: everything validated, nothing provisioned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from pdhub.api.client import EngineClient, LegOrder
from pdhub.api.errors import ConfigError, PDHubError, PluginError
from pdhub.api.operate import Severity
from pdhub.api.plugin import (
    EngineSpec,
    LauncherSpec,
    ParserSpec,
    PluginSpec,
    PolicyPart,
    PolicySpec,
    TransportSpec,
)
from pdhub.config.checks import check_config
from pdhub.config.classes import build_classes
from pdhub.config.explain import explain
from pdhub.config.load import read
from pdhub.config.models import Component, Config, PoolConfig, PrefillConfig
from pdhub.config.origin import Origins, Path
from pdhub.config.overlay import apply, from_flags
from pdhub.config.routing import build_routing
from pdhub.config.settings import environment, settings
from pdhub.config.topology import operate_of, topology
from pdhub.core.slo_classes import Classes
from pdhub.policies.routing import Routing
from pdhub.registry import Registry, load

S_co = TypeVar("S_co", bound=PluginSpec, covariant=True)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[S_co]):
    """A plugin and its validated options."""

    spec: S_co
    config: BaseModel


@dataclass(frozen=True)
class Plan:
    """A configuration whose plugins are found and whose every value is valid.

    Args:
        pools, prefill: engine by pool's and by prefill instance's name.
        path: the file it came from; None if it was made in memory.
        policy: the base policy that ``policy.type`` names. routing: it and everything around it.
        classes: service classes and tenants. order: of those that wait for a place.
        parser: of reasoning and tool calls; None = pools that speak tokens have none.
        origins: where each value came from.
    """

    config: Config
    registry: Registry
    transport: Resolved[TransportSpec]
    policy: Resolved[PolicySpec]
    order: Resolved[PolicySpec]
    launcher: Resolved[LauncherSpec]
    pools: Mapping[str, Resolved[EngineSpec]]
    prefill: Mapping[str, Resolved[EngineSpec]]
    routing: Routing
    classes: Classes
    parser: Resolved[ParserSpec] | None = None
    path: FilePath | None = None
    origins: Origins = field(default_factory=Origins, repr=False, compare=False)


def load_plan(path: str | FilePath, *, registry: Registry | None = None, overrides: Sequence[str] = ()) -> Plan:
    """Read, lay environment and flags over it, validate.

    Args:
        path: a YAML file.
        registry: default: everything installed but for ``plugins.block``.
        overrides: ``a.b.0.c=value`` of flags; they win over the environment, which wins over the file.

    Raises:
        ConfigError, PluginError: with where, what and what to do.
    """
    config, origins = load_config(path, overrides=overrides)
    if registry is None:
        extra = [_module(name, i, origins) for i, name in enumerate(config.plugins.modules)]
        registry = load(block=config.plugins.block, strict=settings().strict_plugins, extra=extra)
    return build_plan(config, registry, FilePath(path), origins=origins)


def _module(name: str, index: int, origins: Origins) -> object:
    try:
        return import_module(name)
    except Exception as error:
        where = origins.where(("plugins", "modules", index))
        hint = "the module must be importable by this Python; is it installed, or on PYTHONPATH?"
        raise PluginError(f"{where}: plugin module '{name}' cannot be imported: {error!r}", hint=hint) from error


def load_config(path: str | FilePath, *, overrides: Sequence[str] = ()) -> tuple[Config, Origins]:
    """The host's part only: no plugin is looked up."""
    data, origins = read(path)
    apply(data, origins, [*environment(), *from_flags(overrides)])
    return parse_config(data, origins), origins


def parse_config(data: Mapping[str, Any], origins: Origins | None = None) -> Config:
    """Plain data → the model. Raises ConfigError that names path and nearest key."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise explain(error, Config, (), origins or Origins()) from None


def build_plan(
    config: Config, registry: Registry, path: FilePath | None = None, *, origins: Origins | None = None
) -> Plan:
    """Find the plugins, validate their options, check the whole.

    Raises:
        ConfigError: a wrong value, or a plugin's veto. PluginError: a missing or broken plugin.
    """
    known = origins or Origins()
    check_config(config, known)
    resolver = _Resolver(known)
    routing = build_routing(config, registry, known)
    plan = Plan(
        config=config,
        registry=registry,
        transport=resolver.resolve(config.handoff.transport, registry.transport, ("handoff", "transport")),
        policy=Resolved(routing.base.spec, routing.base.config),
        order=resolver.resolve(config.admission.order, _orders(registry), ("admission", "order")),
        routing=routing,
        classes=build_classes(config.policy, known),
        launcher=resolver.resolve(config.launcher, registry.launcher, ("launcher",)),
        parser=resolver.optional(config.model.parser, registry.parser, ("model", "parser")),
        pools=resolver.engines(config.pools, registry, "pools"),
        prefill=resolver.engines(config.prefill, registry, "prefill"),
        path=path,
        origins=known,
    )
    _check_engines(plan)
    _refuse(plan)
    registry.configured(config.model_dump(mode="json"))
    return plan


def _orders(registry: Registry) -> Callable[[str], PolicySpec]:
    return lambda name: registry.policy(name, PolicyPart.ADMISSION)


class _Resolver:
    def __init__(self, origins: Origins) -> None:
        self._origins = origins

    def resolve(self, component: Component, find: Any, path: Path) -> Resolved[Any]:
        try:
            spec = find(component.type)
        except PluginError as error:
            where = self._origins.where((*path, "type"))
            raise PluginError(f"{where}: {error.message}", hint=error.hint) from error
        try:
            return Resolved(spec, spec.config.model_validate(component.config))
        except ValidationError as error:
            raise explain(error, spec.config, (*path, "config"), self._origins) from None

    def optional(self, component: Component | None, find: Any, path: Path) -> Resolved[Any] | None:
        return None if component is None else self.resolve(component, find, path)

    def engines(
        self, owners: Sequence[PoolConfig | PrefillConfig], registry: Registry, section: str
    ) -> Mapping[str, Resolved[EngineSpec]]:
        found = {o.name: self.resolve(o.engine, registry.engine, (section, i, "engine")) for i, o in enumerate(owners)}
        return MappingProxyType(found)


def _check_engines(plan: Plan) -> None:
    for i, pool in enumerate(plan.config.pools):
        engine = plan.pools[pool.name]
        where = plan.origins.where(("pools", i, "engine", "type"))
        if engine.spec.client is None and engine.spec.runtime is None:
            hint = "use it under `prefill:`, or choose an engine that decodes"
            raise ConfigError(f"engine '{engine.spec.name}' cannot decode", where=where, hint=hint)
        if needs_prefill(engine) and not any(pool.name in p.pools or not p.pools for p in plan.config.prefill):
            hint = "add an instance under `prefill:`, or choose an engine that prefills itself, such as `openai`"
            if plan.prefill:
                hint = f"add '{pool.name}' to the `pools` of a prefill instance"
            raise ConfigError(f"engine '{engine.spec.name}' needs a prefill instance", where=where, hint=hint)
    for i, prefill in enumerate(plan.config.prefill):
        spec = plan.prefill[prefill.name].spec
        if spec.prefill is None and spec.operate is None and prefill.launch:
            where = plan.origins.where(("prefill", i, "engine", "type"))
            hint = "choose an engine with a prefill facet, or set `launch: false` and run the instance yourself"
            raise ConfigError(f"engine '{spec.name}' cannot prefill", where=where, hint=hint)


def _refuse(plan: Plan) -> None:
    """What the engine plugins know to be impossible. Raises ConfigError for the first of it."""
    whole = topology(plan)
    for node in whole.nodes:
        operate = operate_of(plan, node)
        for finding in operate.refusals(whole) if operate is not None else ():
            if finding.severity is Severity.ERROR:
                raise ConfigError(finding.message, where=finding.where, hint=finding.fix or None)


def needs_prefill(engine: Resolved[EngineSpec]) -> bool:
    """Whether a pool of this engine gets its KV from a prefill instance."""
    client = _client(engine)
    return client is None or client.order is not LegOrder.DECODE_ONLY


def speaks_tokens(engine: Resolved[EngineSpec]) -> bool:
    """Whether the router makes text of what this engine answers, for which it needs the model's tokenizer."""
    client = _client(engine)
    return client is None or client.speaks_tokens


def _client(engine: Resolved[EngineSpec]) -> EngineClient | None:
    """None for the host's own client of nodes."""
    if engine.spec.client is None:
        return None
    try:
        return engine.spec.client(engine.config)
    except PDHubError:
        raise
    except Exception as error:
        raise PluginError(f"the client of engine '{engine.spec.name}' failed: {error!r}") from error
