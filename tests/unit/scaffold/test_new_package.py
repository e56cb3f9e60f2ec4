"""``pdhub new``: what it writes, what it refuses, and that it leaves nothing half done."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from pdhub.api import ConfigError
from pdhub.scaffold.names import Names, check_name
from pdhub.scaffold.write import KINDS, write


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_is_complete(kind: str, tmp_path: Path) -> None:
    made = write(kind, "my-own", tmp_path / "deep" / "er")
    assert made == tmp_path / "deep" / "er" / "pdhub-my-own"
    project = tomllib.loads((made / "pyproject.toml").read_text())
    assert project["project"]["name"] == "pdhub-my-own"
    assert project["project"]["entry-points"]["pdhub"] == {"my-own": "pdhub_my_own.plugin"}
    assert (made / "README.md").read_text().startswith("# pdhub-my-own\n")
    assert (made / "src" / "pdhub_my_own" / "py.typed").exists()
    assert (made / "tests" / "test_conformance.py").exists()
    for path in made.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert not re.search("@[A-Z]+@|PACKAGE", text + path.name), f"a word was not replaced in {path}"
            if path.suffix == ".py":
                ast.parse(text)
    assert "MyOwnConfig" in (made / "src" / "pdhub_my_own" / "plugin.py").read_text()
    assert [p.name for p in made.parent.iterdir()] == ["pdhub-my-own"], "a temporary directory is left"


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_imports_only_the_contract(kind: str, tmp_path: Path) -> None:
    for path in (write(kind, "x", tmp_path) / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pdhub"):
                assert node.module == "pdhub.api" or node.module.startswith("pdhub_x")


def test_the_names() -> None:
    names = Names("my-own_engine2")
    assert names.distribution == "pdhub-my-own-engine2"
    assert names.package == "pdhub_my_own_engine2"
    assert names.camel == "MyOwnEngine2"


@pytest.mark.parametrize(
    ("name", "better"),
    [("My Engine", "my-engine"), ("3x", "x"), ("a--b", "a-b"), ("-a", "a"), ("ünder", "nder"), ("", None),
     ("../x", "x"), ("a/b", "a-b"), ("a.b", "a-b"), ("x" * 60, "x" * 50), ("a\n", "a")],
)  # fmt: skip
def test_impossible_names_are_refused(name: str, better: str | None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be a plugin's name") as caught:
        write("engine", name, tmp_path)
    if better:
        assert f"'{better}'" in str(caught.value.hint)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [("transport", "shm", "already provides"), ("transport", "tilert", "-tilert"), ("engine", "nixl", "pdhub-nixl")],
)
def test_taken_names_are_refused(kind: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        write(kind, name, tmp_path)
    assert caught.value.hint
    assert not list(tmp_path.iterdir())


def test_a_name_of_another_kind_is_free() -> None:
    assert check_name("engine", "shm").name == "shm"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "pdhub-x").mkdir()
    (tmp_path / "pdhub-x" / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="exists already") as caught:
        write("policy", "x", tmp_path)
    assert caught.value.hint
    assert [p.name for p in (tmp_path / "pdhub-x").iterdir()] == ["mine"]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write") as caught:
        write("policy", "x", tmp_path / "file")
    assert "--dir" in str(caught.value.hint)
