"""pdhub, its connector and pdhub-vllm fit into an environment with vLLM, and move none of vLLM's pins.

``data/vllm_requires.json`` has what each version of vLLM requires. With ``PDHUB_NETWORK=1`` pip resolves both as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from pdhub_vllm.versions import CHECKED

HERE = Path(__file__).parent
PACKAGE = HERE.parent
HOST = PACKAGE.parents[1]
KNOWN: dict[str, Any] = json.loads((HERE / "data" / "vllm_requires.json").read_text())["versions"]
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
PYTHONS = ("3.11", "3.12", "3.13")


def ours() -> list[Requirement]:
    """Of the host, which has the connector, and of pdhub-vllm with its extra."""
    found = []
    for path in (HOST, PACKAGE):
        project = tomllib.loads((path / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {})
        found += [*project["dependencies"], *extras.get("kv-events", [])]
    return [Requirement(line) for line in found if not line.startswith("pdhub")]


def for_python(lines: Iterable[str], python: str) -> dict[str, Requirement]:
    where = {**LINUX, "python_version": python, "python_full_version": f"{python}.1"}
    wanted = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r for r in wanted if r.marker is None or r.marker.evaluate(where)}


def pin(requirement: Requirement) -> Version | None:
    return next((Version(s.version) for s in requirement.specifier if s.operator == "=="), None)


def meeting(one: SpecifierSet, other: SpecifierSet) -> bool:
    """Does any version satisfy both? Bounds are enough to try: where a range is open, a version beside its bound."""
    bounds = {Version(s.version.removesuffix(".*")) for s in (*one, *other)}
    tries = bounds | {Version(f"{b}.1") for b in bounds} | {Version("999999")}
    return any(one.contains(v) and other.contains(v) for v in tries)


def test_every_checked_version_is_in_the_data() -> None:
    assert {".".join(version.split(".")[:2]) for version in KNOWN} == set(CHECKED)
    for told in KNOWN.values():
        assert len(told["requires_dist"]) > 50


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("version", KNOWN)
def test_what_vllm_requires_and_what_we_require_meet(version: str, python: str) -> None:
    assert SpecifierSet(KNOWN[version]["requires_python"]).contains(python)
    theirs = for_python(KNOWN[version]["requires_dist"], python)
    compared = 0
    for mine in ours():
        other = theirs.get(canonicalize_name(mine.name))
        if other is None:
            continue
        compared += 1
        if (fixed := pin(other)) is not None:
            assert mine.specifier.contains(fixed), f"{mine} would move vLLM's {other}"
        assert meeting(mine.specifier, other.specifier), f"{mine} and vLLM's {other} exclude one another"
    assert compared >= 5


@pytest.mark.parametrize("version", KNOWN)
def test_what_vllm_pins_or_bounds_above_we_do_not_bound_above(version: str) -> None:
    """An upper bound of ours would fall out of step with the next vLLM."""
    theirs = {canonicalize_name(Requirement(line).name) for line in KNOWN[version]["requires_dist"]}
    for mine in ours():
        if canonicalize_name(mine.name) in theirs:
            assert {s.operator for s in mine.specifier} <= {">="}, mine


def test_nothing_of_ours_requires_vllm_or_torch() -> None:
    """Which build of them is there is the user's choice."""
    assert not {canonicalize_name(r.name) for r in ours()} & {"vllm", "torch", "transformers", "triton"}


def test_the_check_sees_what_it_should() -> None:
    assert not meeting(SpecifierSet(">=0.140"), SpecifierSet("<0.137,>=0.133"))
    assert not meeting(SpecifierSet("<2"), SpecifierSet(">=2"))
    assert meeting(SpecifierSet(">=0.115"), SpecifierSet("<0.137,>=0.133"))
    assert meeting(SpecifierSet(">1,!=1.1"), SpecifierSet("<2"))
    assert pin(Requirement("torch==2.14.0")) == Version("2.14.0")


@pytest.mark.skipif(os.environ.get("PDHUB_NETWORK") != "1", reason="PDHUB_NETWORK=1 lets pip resolve over the network")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", KNOWN)
def test_pip_resolves_both_to_the_same_versions(version: str, tmp_path: Path) -> None:
    alone = resolved(tmp_path / "alone.json", f"vllm=={version}")
    both = resolved(tmp_path / "both.json", f"vllm=={version}", str(HOST), f"{PACKAGE}[kv-events]")
    assert {"pdhub", "pdhub-vllm", "pyzmq"} <= both.keys()
    assert {name: both[name] for name in alone} == alone


def resolved(report: Path, *wanted: str) -> dict[str, str]:
    """Versions that pip would install into an empty environment. Only metadata is loaded where the index serves it."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", report]
    done = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    entries = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return {canonicalize_name(entry["name"]): entry["version"] for entry in entries}
