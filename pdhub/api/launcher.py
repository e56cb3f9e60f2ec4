"""How ``pdhub up`` starts processes. The built-in launcher is ``local``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from pdhub.api.operate import Process


class Running(ABC):
    """One started process."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The node's name."""

    @abstractmethod
    def poll(self) -> int | None:
        """Exit status, or None while it runs (negative: the signal that killed it)."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask it to stop (it drains). Idempotent."""

    @abstractmethod
    def kill(self) -> None:
        """Stop it and everything that it started, now. Idempotent."""


class Launcher(ABC):
    """Starts processes. Whatever it starts ends with the process that called it, even if that one is killed."""

    @abstractmethod
    def start(self, name: str, process: Process, on_line: Callable[[str, str], None]) -> Running:
        """Start; ``on_line(name, line)`` gets each line of output, from any thread.

        Raises ConfigError if the command cannot be run.
        """

    @abstractmethod
    def close(self) -> None:
        """Kill what still runs. Idempotent."""
