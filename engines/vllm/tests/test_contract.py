"""What the plugin uses of vLLM, looked for in wheels. Real ones are read where PDHUB_VLLM_WHEELS names their folder."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pdhub_vllm.command import VLLMCommand
from pdhub_vllm.contract import NEEDS, check, table, version_of
from pdhub_vllm.versions import CHECKED

from pdhub.api import CommandHost

_FOLDER = os.environ.get("PDHUB_VLLM_WHEELS")
WHEELS = sorted(Path(_FOLDER).glob("vllm*.whl")) if _FOLDER else []
HOST = CommandHost(topology=lambda *_: pytest.fail("not asked"), process=lambda *_: pytest.fail("not asked"))

Made = Callable[..., Path]


@pytest.fixture
def wheel(tmp_path: Path) -> Made:
    """A wheel that has every name but for those of ``without``."""

    def made(*without: str, version: str = "0.99.0") -> Path:
        path = tmp_path / f"vllm-{version}-cp38-abi3-linux_x86_64.whl"
        files: dict[str, list[str]] = {}
        for need in NEEDS:
            words = [f'"{word}"' for word in need.names if word not in without]
            files.setdefault(need.files.replace("*", "x"), []).extend(words)
        with zipfile.ZipFile(path, "w") as archive:
            for name, words in files.items():
                archive.writestr(name, "\n".join(words))
        return path

    return made


def test_nothing_is_missing(wheel: Made) -> None:
    path = wheel()
    assert version_of(path) == "0.99.0"
    assert [result.need.what for result in check(path) if result.missing] == []


def test_a_renamed_name_is_found(wheel: Made) -> None:
    broken = [r for r in check(wheel("kv_lease_duration")) if r.need.what == "NIXL options"]
    assert [r.missing for r in broken] == [("kv_lease_duration",)]
    assert not broken[0].ok
    lost = [r for r in check(wheel("remote_prefill_cached_tokens")) if r.need.optional and r.missing]
    assert any("remote_prefill_cached_tokens" in r.missing for r in lost)
    assert all(r.ok for r in lost)


def test_part_of_a_word_is_not_the_word(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "envs.py").write_text("VLLM_API_KEYS = MY_VLLM_NIXL_SIDE_CHANNEL_HOST")
    (need,) = [r for r in check(tmp_path) if r.need.what == "environment"]
    assert {"VLLM_API_KEY", "VLLM_NIXL_SIDE_CHANNEL_HOST"} <= set(need.missing)


def test_the_verb(wheel: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert VLLMCommand().run_with(["contract", str(wheel("kv_lease_duration"))], HOST) == 1
    assert "! NIXL options: kv_lease_duration" in capsys.readouterr().out
    assert VLLMCommand().run_with(["contract", str(tmp_path / "none.whl")], HOST) == 2
    assert VLLMCommand().run_with(["contract", str(tmp_path)], HOST) == 2
    assert "no package 'vllm'" in capsys.readouterr().err


@pytest.mark.skipif(not WHEELS, reason="PDHUB_VLLM_WHEELS names no folder with wheels of vLLM")
@pytest.mark.parametrize("path", WHEELS, ids=version_of)
def test_a_real_wheel_has_everything(path: Path) -> None:
    results = check(path)
    assert [r.need.what for r in results if not r.ok] == [], "\n".join(table({version_of(path): results}))


@pytest.mark.skipif(not WHEELS, reason="PDHUB_VLLM_WHEELS names no folder with wheels of vLLM")
@pytest.mark.parametrize("path", WHEELS, ids=version_of)
def test_a_real_wheel_takes_our_lower_bounds(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    theirs = [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if line.startswith("Requires-Dist: ")]
    for mine in requirements():
        for other in theirs:
            if other.name.lower().replace("_", "-") == mine.name.lower().replace("_", "-") and other.marker is None:
                ceilings = [s.version for s in other.specifier if s.operator in ("<", "<=", "==", "~=")]
                for ceiling in ceilings:
                    assert all(parts(s.version) < parts(ceiling) for s in mine.specifier), f"{mine} against {other}"


def requirements() -> list[Requirement]:
    """Of the host and of this plugin, without extras."""
    found = [Requirement(text) for name in ("pdhub", "pdhub-vllm") for text in metadata.requires(name) or ()]
    return [r for r in found if r.name != "pdhub" and "extra" not in str(r.marker or "")]


def parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def test_nothing_is_pinned_or_capped() -> None:
    """Installed beside vLLM, pdhub must not move one of its pins: lower bounds are all that it asks for."""
    assert requirements()
    for requirement in requirements():
        assert {s.operator for s in requirement.specifier} <= {">="}, requirement


def test_the_readme_says_which_versions_were_checked() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for version in CHECKED:
        assert version in readme
