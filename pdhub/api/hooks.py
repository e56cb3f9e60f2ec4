"""The hooks of pdhub. A plugin is a module (or object) named by an entry point of the group ``pdhub``::

    # pyproject.toml
    [project.entry-points.pdhub]
    myengine = "pdhub_myengine.plugin"

    # pdhub_myengine/plugin.py
    from pdhub.api import EngineSpec, hookimpl

    @hookimpl
    def pdhub_register_engines():
        return [EngineSpec(name="myengine", summary="…", runtime=make_runtime)]

Registration hooks are called once at start-up, in any process that loads plugins (router, node, vLLM worker,
command line), so they must be cheap and must not touch devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pluggy

from pdhub.api.plugin import (
    CommandSpec,
    DiscoverySpec,
    EngineSpec,
    LauncherSpec,
    ParserSpec,
    PolicySpec,
    TransportSpec,
)
from pdhub.api.request import RequestRecord

PROJECT = "pdhub"
"""pluggy project name and entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def pdhub_register_engines() -> Iterable[EngineSpec]:
    """Engines that this plugin adds."""
    raise NotImplementedError


@hookspec
def pdhub_register_transports() -> Iterable[TransportSpec]:
    """KV transports that this plugin adds."""
    raise NotImplementedError


@hookspec
def pdhub_register_policies() -> Iterable[PolicySpec]:
    """Routing policies, filters and scorers that this plugin adds."""
    raise NotImplementedError


@hookspec
def pdhub_register_parsers() -> Iterable[ParserSpec]:
    """Reasoning and tool-call parsers that this plugin adds."""
    raise NotImplementedError


@hookspec
def pdhub_register_launchers() -> Iterable[LauncherSpec]:
    """Ways to start processes that this plugin adds."""
    raise NotImplementedError


@hookspec
def pdhub_register_discovery() -> Iterable[DiscoverySpec]:
    """Membership sources that this plugin adds."""
    raise NotImplementedError


@hookspec
def pdhub_register_commands() -> Iterable[CommandSpec]:
    """Command groups that this plugin adds to ``pdhub``."""
    raise NotImplementedError


@hookspec
def pdhub_configured(config: Mapping[str, Any]) -> None:
    """After the whole configuration was validated, before anything is provisioned.

    Args:
        config: the validated configuration as plain data, read-only.

    Raise :class:`~pdhub.api.errors.ConfigError` to veto the start.
    """


@hookspec
def pdhub_request_finished(record: RequestRecord) -> None:
    """A request ended. Called in a worker thread through a bounded queue (drops are counted), never on the
    event loop; exceptions are logged and go no further."""
