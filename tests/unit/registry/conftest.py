"""Installed distributions that exist only for a test: an entry point each, on sys.path."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(name, code)`` lays out what ``pip install pdhub-NAME`` would leave on ``sys.path``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("pdhub.registry.registry._warned", set())  # as in a process of its own
    made: list[str] = []

    def install(name: str, code: str, *, entry: str | None = None) -> None:
        module = f"fake_{name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(code))
        info = tmp_path / f"pdhub_{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pdhub-{name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[pdhub]\n{name} = {entry or module}\n")
        made.append(module)

    yield install
    for module in made:
        sys.modules.pop(module, None)


@pytest.fixture
def engine_code() -> Callable[..., str]:
    """Source of a plugin with one engine; ``extra`` goes into the spec."""

    def code(name: str, extra: str = "") -> str:
        return f"""
        from pdhub.api import EngineSpec, hookimpl

        @hookimpl
        def pdhub_register_engines():
            return [EngineSpec(name={name!r}, summary="x", runtime=lambda config, context: None{extra})]
        """

    return code
