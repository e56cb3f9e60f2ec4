"""The typed face of pluggy: everything else asks here and never sees a hook caller."""

from __future__ import annotations

import difflib
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import pluggy

from pdhub.api import hooks
from pdhub.api.errors import PDHubError, PluginError
from pdhub.api.plugin import (
    CommandSpec,
    DiscoverySpec,
    EngineSpec,
    LauncherSpec,
    ParserSpec,
    PluginSpec,
    PolicyPart,
    PolicySpec,
    TransportSpec,
)
from pdhub.api.request import RequestRecord
from pdhub.registry.catalog import Catalog, Entry, clash_error
from pdhub.registry.discover import Source, describe, discover
from pdhub.registry.row import PluginRow, Status
from pdhub.registry.validate import HOOKS, check_spec, kind_of

log = logging.getLogger("pdhub.registry")
S = TypeVar("S", bound=PluginSpec)

_warned: set[str] = set()
"""What this process was told already: one command may load the plugins several times."""


def load(
    *, block: Collection[str] = (), strict: bool = False, extra: Iterable[object] = (), warn: bool = True
) -> Registry:
    """Load every installed plugin.

    Args:
        block: distributions whose entry points are not loaded.
        strict: a broken plugin, an incompatible one or two of one name raise instead of being set aside.
        extra: modules or objects with hooks that are registered directly, as in tests.
        warn: log one warning a broken plugin, once a process; a caller that shows :meth:`Registry.rows` needs none.

    Raises:
        PluginError: only if ``strict``.
    """
    registry = Registry()
    for source in discover(block, extra):
        registry._register(source)
    registry._finish(strict, warn)
    return registry


class Registry:
    """What is installed. Made by :func:`load`; read-only and thread-safe afterwards."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hooks.PROJECT)
        self._manager.add_hookspecs(hooks)
        self._numbers = itertools.count(1)
        self._catalog = Catalog()
        self._failed: list[Source] = []
        self._rows: list[PluginRow] = []
        self._problems: list[PluginError] = []
        self._configured: list[Source] = []
        self._observers: list[Source] = []

    def engine(self, name: str) -> EngineSpec:
        """The engine of that name. As all lookups it raises PluginError if it is not there."""
        return self._find("engine", name, EngineSpec)

    def transport(self, name: str) -> TransportSpec:
        return self._find("transport", name, TransportSpec)

    def policy(self, name: str, part: PolicyPart = PolicyPart.POLICY) -> PolicySpec:
        return self._find(part.value, name, PolicySpec)

    def parser(self, name: str) -> ParserSpec:
        return self._find("parser", name, ParserSpec)

    def launcher(self, name: str) -> LauncherSpec:
        return self._find("launcher", name, LauncherSpec)

    def discovery(self, name: str) -> DiscoverySpec:
        return self._find("discovery", name, DiscoverySpec)

    def command(self, name: str) -> CommandSpec:
        return self._find("command", name, CommandSpec)

    def commands(self) -> list[CommandSpec]:
        """All command groups, by name."""
        return self.specs(CommandSpec)

    def specs(self, cls: type[S]) -> list[S]:
        """All usable specs of one class, by kind and name."""
        found = [e.spec for e in self._catalog if isinstance(e.spec, cls)]
        return sorted(found, key=lambda s: (kind_of(s), s.name))

    def names(self, kind: str) -> list[str]:
        """Usable names of a kind."""
        return self._catalog.names(kind)

    def distribution(self, spec: PluginSpec) -> str:
        """Who gave a spec; empty if it was registered by hand."""
        return next((e.source.distribution for e in self._catalog if e.spec is spec), "")

    def rows(self) -> list[PluginRow]:
        """Everything found, working or not, by kind, name and distribution."""
        return sorted(self._rows, key=lambda r: (r.kind, r.name, r.distribution))

    def configured(self, config: Mapping[str, Any]) -> None:
        """Tell every plugin the validated configuration.

        Raises:
            ConfigError: a plugin's veto. PluginError: a plugin's hook failed.
        """
        frozen = _freeze(config)
        for source in self._configured:
            try:
                self._call(source, "pdhub_configured", config=frozen)
            except PDHubError:
                raise
            except Exception as error:
                raise PluginError(f"{source}: hook pdhub_configured raised {describe(error)}") from error

    @property
    def has_observers(self) -> bool:
        """Whether anybody wants :meth:`request_finished`."""
        return bool(self._observers)

    def request_finished(self, record: RequestRecord) -> None:
        """Tell every observer; never raises. Blocks as long as they do, so call it off the event loop."""
        for source in self._observers:
            try:
                self._call(source, "pdhub_request_finished", record=record)
            except Exception:
                log.exception("%s: hook pdhub_request_finished failed", source)

    def _find(self, kind: str, name: str, cls: type[S]) -> S:
        spec = self._catalog.find(kind, name, self._failed)
        assert isinstance(spec, cls)
        return spec

    def _register(self, source: Source) -> None:
        if source.plugin is None:
            self._fail(source)
            return
        if not source.distribution and self._manager.is_registered(source.plugin):
            return  # given by hand, and installed as well
        try:
            hash(source.plugin)  # pluggy keeps plugins in sets
            self._manager.register(source.plugin, f"{source.distribution}/{source.name}#{next(self._numbers)}")
            self._reject_unknown_hooks(source)
        except (pluggy.PluginValidationError, ValueError, TypeError) as error:
            if any(plugin is source.plugin for _, plugin in self._manager.list_name_plugin()):
                self._manager.unregister(source.plugin)
            self._fail(_failed(source, describe(error)))
            return
        implemented = {c.name for c in self._manager.get_hookcallers(source.plugin) or ()}
        for hook in HOOKS.keys() & implemented:
            self._collect(source, hook)
        if "pdhub_configured" in implemented:
            self._configured.append(source)
        if "pdhub_request_finished" in implemented:
            self._observers.append(source)

    def _reject_unknown_hooks(self, source: Source) -> None:
        callers = self._manager.get_hookcallers(source.plugin)
        if not callers:
            raise ValueError("it implements no hook; put @hookimpl before its functions pdhub_…")
        for caller in callers:
            if not caller.has_spec():
                known = [n for n in dir(hooks) if n.startswith("pdhub_")]
                near = difflib.get_close_matches(caller.name, known, n=1)
                suggestion = f"; did you mean '{near[0]}'?" if near else ""
                raise ValueError(f"there is no hook '{caller.name}'{suggestion}")

    def _collect(self, source: Source, hook: str) -> None:
        try:
            items = [item for result in self._call(source, hook) for item in result]
        except Exception as error:  # noqa: BLE001 - a plugin's code
            self._fail(_failed(source, f"hook {hook} failed: {describe(error)}"))
            return
        for item in items:
            fault = check_spec(item, hook)
            if fault is None:
                self._catalog.add(Entry(item, source))
            else:
                self._fail(_failed(source, fault.error), HOOKS[hook].kind, fault.name)

    def _call(self, source: Source, hook: str, **arguments: Any) -> list[Any]:
        """One hook of one plugin, so that a failure has an owner."""
        others = [p for p in self._manager.get_plugins() if p is not source.plugin]
        result: list[Any] = self._manager.subset_hook_caller(hook, others)(**arguments)
        return result

    def _fail(self, source: Source, kind: str = "plugin", name: str = "") -> None:
        self._failed.append(source)
        status = Status.BLOCKED if source.blocked else Status.BROKEN
        self._rows.append(
            PluginRow(kind, name or source.name, source.distribution, source.version, "", status, error=source.error)
        )
        if not source.blocked:
            self._problems.append(PluginError(f"{source} is broken: {source.error}", hint="`pdhub plugins` lists all"))

    def _finish(self, strict: bool, warn: bool) -> None:
        for entry in self._catalog:
            self._rows.append(_row(entry, Status.OK))
        for entries in self._catalog.clashes():
            error = clash_error(entries)
            self._problems.append(error)
            self._rows.extend(_row(entry, Status.BROKEN, error.message) for entry in entries)
        if strict and self._problems:
            raise self._problems[0]
        for problem in self._problems if warn else ():
            if problem.message not in _warned:
                _warned.add(problem.message)
                log.warning("%s", problem.message)


def _failed(source: Source, error: str) -> Source:
    return Source(source.name, source.distribution, source.version, error=error)


def _row(entry: Entry, status: Status, error: str = "") -> PluginRow:
    spec, source = entry.spec, entry.source
    return PluginRow(
        kind_of(spec), spec.name, source.distribution, source.version, spec.stability.value, status, spec.summary, error
    )


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType({k: _freeze(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    return value
