"""What a spec must look like. Messages name the plugin, the hook and the argument."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from pdhub.api.plugin import (
    API_VERSION,
    CommandSpec,
    DiscoverySpec,
    EngineSpec,
    LauncherSpec,
    ParserSpec,
    PluginSpec,
    PolicyPart,
    PolicySpec,
    Stability,
    TransportSpec,
)
from pdhub.registry.providers import BUILTIN_COMMANDS

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")

HOOKS: dict[str, type[PluginSpec]] = {
    "pdhub_register_engines": EngineSpec,
    "pdhub_register_transports": TransportSpec,
    "pdhub_register_policies": PolicySpec,
    "pdhub_register_parsers": ParserSpec,
    "pdhub_register_launchers": LauncherSpec,
    "pdhub_register_discovery": DiscoverySpec,
    "pdhub_register_commands": CommandSpec,
}
"""Registration hooks and the spec that each gives."""

_FACETS = ("client", "runtime", "prefill", "operate")


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one returned item cannot be used."""

    name: str
    error: str


def kind_of(spec: PluginSpec) -> str:
    """The name space of a spec: its kind; for policies the part, since each part has names of its own."""
    return spec.part.value if isinstance(spec, PolicySpec) else spec.kind


def check_spec(spec: Any, hook: str) -> Fault | None:
    """None if ``spec``, an item that ``hook`` returned, keeps every rule."""
    expected = HOOKS[hook]
    if not isinstance(spec, expected):
        return Fault("?", f"{hook} must return {expected.__name__} objects, it returned {spec!r:.80}")
    raw = getattr(spec, "name", None)
    where = f"{hook}: {expected.__name__}(name={raw!r})"
    if not isinstance(raw, str) or not NAME.fullmatch(raw):
        return Fault(str(raw), f"{where}: argument 'name' must match {NAME.pattern}")
    problem = _problem(spec)
    return Fault(raw, f"{where}: {problem}") if problem else None


def _problem(spec: PluginSpec) -> str | None:
    if not isinstance(spec.summary, str) or not spec.summary.strip() or "\n" in spec.summary:
        return "argument 'summary' must be one line of text"
    if not (inspect.isclass(spec.config) and issubclass(spec.config, BaseModel)):
        return f"argument 'config' must be a pydantic model class, it is {spec.config!r:.80}"
    if not isinstance(spec.stability, Stability):
        return f"argument 'stability' must be a Stability, it is {spec.stability!r}"
    return _version_problem(spec.api_version) or _facet_problem(spec)


def _version_problem(version: Any) -> str | None:
    pair = isinstance(version, tuple) and len(version) == 2 and all(type(v) is int for v in version)
    if not pair:
        return f"argument 'api_version' must be (major, minor), it is {version!r}"
    major, minor = version
    if major == API_VERSION[0] and minor <= API_VERSION[1]:
        return None
    host = ".".join(map(str, API_VERSION))
    return f"it needs plugin API {major}.{minor}, this pdhub has {host}; install matching versions of both"


def _facet_problem(spec: PluginSpec) -> str | None:
    if isinstance(spec, EngineSpec):
        given = {name: getattr(spec, name) for name in _FACETS if getattr(spec, name) is not None}
        if not given:
            return f"an engine needs at least one of {', '.join(_FACETS)}"
        bad = [name for name, value in given.items() if not callable(value)]
        return f"argument '{bad[0]}' must be callable" if bad else None
    if isinstance(spec, PolicySpec) and not isinstance(spec.part, PolicyPart):
        return f"argument 'part' must be a PolicyPart, it is {spec.part!r}"
    if isinstance(spec, CommandSpec) and spec.name in BUILTIN_COMMANDS:
        return f"'{spec.name}' is a verb of pdhub itself; choose another name"
    if isinstance(spec, ParserSpec) and not callable(spec.declares):
        return f"argument 'declares' must be callable, it is {spec.declares!r:.80}"
    factory = getattr(spec, "factory", None)
    return None if callable(factory) else f"argument 'factory' must be callable, it is {factory!r:.80}"
