"""The last lines that each process wrote, for the message when it dies."""

from __future__ import annotations

import threading
from collections import deque

KEEP = 40


class Tail:
    """Thread-safe: lines come from the launcher's threads.

    Args:
        keep: lines kept for each process.
    """

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._lines: dict[str, deque[str]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, line: str) -> None:
        with self._lock:
            self._lines.setdefault(name, deque(maxlen=self._keep)).append(line)

    def forget(self, name: str) -> None:
        """A new process of this name starts."""
        with self._lock:
            self._lines.pop(name, None)

    def last(self, name: str, count: int = 15) -> list[str]:
        """At most ``count`` lines, oldest first."""
        with self._lock:
            return list(self._lines.get(name, ()))[-count:]
