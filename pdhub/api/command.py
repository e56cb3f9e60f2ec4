"""Commands that a plugin adds to the command line: ``pdhub NAME …``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Command(ABC):
    """One group of verbs. ``help`` needs examples."""

    help: str = ""

    @abstractmethod
    def run(self, args: Sequence[str]) -> int:
        """Run with the words after ``pdhub NAME``; the exit status. Usage errors are 2, with a message."""
