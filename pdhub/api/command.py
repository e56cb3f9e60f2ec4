"""Commands that a plugin adds to the command line: ``pdhub NAME …``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdhub.api.operate import Process, Topology


@dataclass(frozen=True, slots=True)
class CommandHost:
    """What the host does for a command.

    Args:
        topology: of a configuration file, with overrides (``a.b=value``). Raises ConfigError, PluginError.
        process: how ``pdhub up`` would start a node of that file, by name. Raises as ``topology``.
    """

    topology: Callable[[str, Sequence[str]], Topology]
    process: Callable[[str, str, Sequence[str]], Process]


class Command(ABC):
    """One group of verbs. ``help`` needs examples."""

    help: str = ""

    @abstractmethod
    def run(self, args: Sequence[str]) -> int:
        """Run with the words after ``pdhub NAME``; the exit status. Usage errors are 2, with a message."""

    def run_with(self, args: Sequence[str], host: CommandHost) -> int:
        """As :meth:`run`, for commands that look at a configuration. This is what the host calls."""
        return self.run(args)
