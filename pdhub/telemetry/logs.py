"""Logging of a pdhub process: one line a record on stderr, coloured on a terminal."""

from __future__ import annotations

import logging
import sys
from typing import Final

LEVELS: Final = ("debug", "info", "warning", "error")
PLAIN: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure(level: str = "info", *, color: bool | None = None) -> None:
    """Send the loggers below ``pdhub`` to stderr. Calling it again replaces what the last call set.

    Args:
        level: one of :data:`LEVELS`, any case. Raises ValueError for another word.
        color: None means: if stderr is a terminal.
    """
    if level.lower() not in LEVELS:
        raise ValueError(f"unknown log level {level!r}; choose one of {', '.join(LEVELS)}")
    logger = logging.getLogger("pdhub")
    for old in [h for h in logger.handlers if getattr(h, "pdhub_owned", False)]:
        logger.removeHandler(old)
    handler = _handler(sys.stderr.isatty() if color is None else color)
    handler.pdhub_owned = True  # type: ignore[attr-defined]
    logger.addHandler(handler)
    logger.setLevel(level.upper())


def _handler(color: bool) -> logging.Handler:
    if color:
        from rich.console import Console
        from rich.logging import RichHandler

        rich = RichHandler(console=Console(stderr=True), show_path=False, rich_tracebacks=False)
        rich.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        return rich
    plain = logging.StreamHandler(sys.stderr)
    plain.setFormatter(logging.Formatter(PLAIN, datefmt="%H:%M:%S"))
    return plain
