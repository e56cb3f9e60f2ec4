"""What code does to the world outside: Python's audit events of this thread."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_OUTSIDE = ("open", "time.sleep", "os.", "socket.", "subprocess.", "shutil.", "urllib.", "http.", "sqlite3.")
_watching = threading.local()


@contextmanager
def effects() -> Iterator[list[str]]:
    """Collects, as ``event: first argument``, what this thread reads, writes, sends, starts or waits for meanwhile.

    Sees what the interpreter and its standard library do, not what native code does by itself;
    pauses from Python 3.13 on.
    """
    _install()
    found: list[str] = []
    _watching.found = found
    try:
        yield found
    finally:
        _watching.found = None


@functools.cache
def _install() -> None:
    """Once a process: audit hooks cannot be taken away again."""
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[object, ...]) -> None:
    found = getattr(_watching, "found", None)
    if found is not None and event.startswith(_OUTSIDE):
        found.append(f"{event}: {args[0]!r}" if args else event)
