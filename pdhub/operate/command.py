"""What the host does for a plugin's command."""

from __future__ import annotations

from collections.abc import Sequence

from pdhub.api import CommandHost, Process, Topology
from pdhub.config.build import load_plan
from pdhub.operate.tree import process
from pdhub.operate.tree import topology as topology_of


def command_host() -> CommandHost:
    """For :meth:`pdhub.api.Command.run_with`."""
    return CommandHost(topology=_topology, process=_process)


def _topology(path: str, overrides: Sequence[str]) -> Topology:
    return topology_of(load_plan(path, overrides=overrides))


def _process(path: str, name: str, overrides: Sequence[str]) -> Process:
    plan = load_plan(path, overrides=overrides)
    return process(plan, topology_of(plan), name, overrides)
