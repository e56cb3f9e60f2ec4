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
        secrets: variables to set from others of this process's environment, ``{name: source}``, so that no key is
            ever printed.
        ready_url: answers 200 when it can serve. ready_within_s: after that long the start has failed.
    """

    argv: tuple[str, ...]
    ready_url: str
    env: Mapping[str, str] = field(default_factory=dict)
    ready_within_s: float = 120.0
    secrets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One configured node or prefill instance, as :class:`Operate` may see it.

    Args:
        role: ``prefill`` or ``decode``. pool: of a decode node.
        url: where this machine reaches it. host, port: where it listens; launch: whether ``pdhub up`` starts it.
        api_key_env: environment variable with its key. api_key: the key itself, only where calls may be made.
        serves: pools that a prefill instance computes prompts for.
        children: what the decode nodes of those pools need in a prefill instance's transfer config, each once.
        threads: CPU threads of the engine; 0 = it chooses.
    """

    name: str
    role: str
    pool: str | None
    url: str
    engine: str
    config: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    launch: bool = True
    api_key_env: str | None = None
    api_key: str | None = field(default=None, repr=False)
    serves: tuple[str, ...] = ()
    children: tuple[Mapping[str, Any], ...] = ()
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """All of the configuration that a deployment may depend on."""

    model: str
    model_path: str | None
    nodes: tuple[NodeSpec, ...]
    transport: str
    config_path: str | None = None

    def node(self, name: str) -> NodeSpec | None:
        """By name."""
        return next((node for node in self.nodes if node.name == name), None)

    def prefills_of(self, pool: str) -> tuple[NodeSpec, ...]:
        """Prefill instances that may compute a pool's prompts."""
        return tuple(node for node in self.nodes if node.role == "prefill" and pool in node.serves)


class Operate(ABC):
    """Every method is optional; the defaults say "nothing to do"."""

    def process(self, node: NodeSpec, topology: Topology) -> Process | None:
        """How ``pdhub up`` starts this node. None: the host's own ``pdhub node``, run by the interpreter that the
        options' ``python`` names, if there is such an option, and given their ``ready_within_s``."""
        return None

    def prefill_child(self, node: NodeSpec, topology: Topology) -> Mapping[str, Any] | None:
        """The child of the prefill's transfer config that this decode node needs. The plugin that owns the
        prefill composes the children that the host collected. For a node of ``pdhub node`` the host declares its own
        connector; a child that has nothing but ``kv_connector_extra_config`` only adds to that one's."""
        return None

    def refusals(self, topology: Topology) -> Sequence[Finding]:
        """What cannot work, as far as the configuration alone tells. Pure and fast: every start asks, and an
        ``ERROR`` ends it, as it ends ``pdhub check``."""
        return ()

    def checks(self, topology: Topology) -> Sequence[Finding]:
        """What ``pdhub doctor`` reports. May open connections to the topology's nodes, nowhere else; blocking, in a
        thread of its own. Asked once for each distinct set of options."""
        return ()
