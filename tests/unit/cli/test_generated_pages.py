"""Every hook, error code, configuration key and verb is documented, and the committed pages are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from pdhub.api import errors, hooks
from pdhub.api.plugin import PluginSpec
from pdhub.cli.app import config_app, verbs
from pdhub.cli.pages import pages, stale, write
from pdhub.config import models
from pdhub.config.settings import Settings
from pdhub.registry import load

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages()


def test_the_committed_pages_are_up_to_date() -> None:
    assert stale(DOCS) == [], "run `pdhub config docs`"


def test_stale_pages_are_found(tmp_path: Path) -> None:
    assert len(stale(tmp_path)) == 2
    write(tmp_path)
    assert stale(tmp_path) == []
    (tmp_path / "config.md").write_text("old")
    assert stale(tmp_path) == [tmp_path / "config.md"]


def test_every_key_of_the_host_has_a_description_and_a_row(made: dict[str, str]) -> None:
    found = [m for m in vars(models).values() if isinstance(m, type) and issubclass(m, BaseModel)]
    for model in found:
        for name, info in model.model_fields.items():
            assert info.description, f"{model.__name__}.{name} has no description"
            assert f"| `{name}` |" in made["config.md"]
    for name in Settings.model_fields:
        assert f"`PDHUB_{name.upper()}`" in made["config.md"]


def test_every_builtin_plugins_option_is_there(made: dict[str, str]) -> None:
    registry = load(warn=False)
    own = [s for s in registry.specs(PluginSpec) if registry.distribution(s) == "pdhub"]
    assert own
    for spec in own:
        assert f"`{spec.name}`" in made["config.md"]
        for name, info in spec.config.model_fields.items():
            assert info.description, f"{spec.kind} {spec.name}: {name} has no description"
            assert f"| `{name}` |" in made["config.md"]


def test_every_hook_is_there(made: dict[str, str]) -> None:
    names = [n for n in dir(hooks) if n.startswith("pdhub_")]
    assert len(names) >= 9
    for name in names:
        assert f"`{name}(" in made["reference.md"]
        assert getattr(hooks, name).__doc__


def test_every_error_code_is_there(made: dict[str, str]) -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.PDHubError)]
    for cls in classes:
        assert f"| `{cls.code}` | {cls.__name__} |" in made["reference.md"]


def test_every_verb_is_there(made: dict[str, str]) -> None:
    names = [v for v in verbs() if v != "config"]
    names += [f"config {c.callback.__name__}" for c in config_app.registered_commands if c.callback]
    for name in names:
        assert f"### `pdhub {name}`" in made["reference.md"]
