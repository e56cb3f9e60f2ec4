"""Where results go."""

from __future__ import annotations

from pathlib import Path

from pdhub.api.errors import ConfigError


def check_out(path: Path | None) -> None:
    """Before the work, whose result would be lost otherwise. Raises ConfigError if ``path`` cannot be a new file."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"'{path}' is a directory", where="--out", hint="name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory '{path.parent}'", where="--out", hint="make it first")
