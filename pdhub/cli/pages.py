"""The generated pages of ``docs/``: written by ``pdhub config docs``, compared by ``--check``."""

from __future__ import annotations

from pathlib import Path

from pdhub.cli.reference import reference_markdown
from pdhub.config.docs_gen import config_markdown
from pdhub.registry import load


def pages() -> dict[str, str]:
    """File name → content. Only plugins of the host itself, so that it is the same everywhere."""
    return {"config.md": config_markdown(load(warn=False)), "reference.md": reference_markdown()}


def write(directory: Path) -> list[Path]:
    """Write every page; the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    made = []
    for name, text in pages().items():
        path = directory / name
        path.write_text(text, encoding="utf-8")
        made.append(path)
    return made


def stale(directory: Path) -> list[Path]:
    """Pages that are missing or differ from what would be written."""
    return [
        directory / name
        for name, text in pages().items()
        if not (directory / name).is_file() or (directory / name).read_text(encoding="utf-8") != text
    ]
