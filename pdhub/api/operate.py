"""The deployment-side contract of an engine: how its processes start and what can be checked."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. ``where`` is a config path or a node's name; ``fix`` says what to change."""

    severity: Severity
    where: str
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """How to start one process.

    Args:
        argv: the command; ``env`` is added to the environment.
        ready_url: answers 200 when it can serve. ready_within_s: after that long the start has failed.
    """

    argv: tuple[str, ...]
    ready_url: str
    env: Mapping[str, str] = field(default_factory=dict)
    ready_within_s: float = 120.0


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One configured node or prefill instance, as :class:`Operate` may see it."""

    name: str
    role: str
    pool: str | None
    url: str
    engine: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Topology:
    """All of the configuration that a deployment may depend on."""

    model: str
    model_path: str | None
    nodes: tuple[NodeSpec, ...]
    transport: str
    config_path: str | None = None


class Operate(ABC):
    """Every method is optional; the defaults say "nothing to do"."""

    def process(self, node: NodeSpec, topology: Topology) -> Process | None:
        """How ``pdhub up`` starts this node. None: the host's own ``pdhub node``."""
        return None

    def prefill_child(self, node: NodeSpec, topology: Topology) -> Mapping[str, Any] | None:
        """The child of the prefill's transfer config that this decode node needs. The plugin that owns the
        prefill composes the children that the host collected."""
        return None

    def checks(self, topology: Topology) -> Sequence[Finding]:
        """What ``pdhub doctor`` reports. May open connections to the topology's nodes, nowhere else."""
        return ()
