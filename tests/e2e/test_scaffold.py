"""``pdhub new``, then what its README says: install, test, list. No change to pdhub in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdhub.scaffold.write import KINDS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def output(*command: object, cwd: Path, site: Path) -> str:
    """stdout of a command that must succeed, with ``site`` as a further site directory."""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_installs_passes_its_kit_and_is_listed(kind: str, tmp_path: Path) -> None:
    site, name = tmp_path / "site", f"my-{kind}"
    site.mkdir()
    pdhub = (sys.executable, "-m", "pdhub")
    made = tmp_path / f"pdhub-{name}"
    assert str(made) in output(*pdhub, "new", kind, name, "--dir", tmp_path, cwd=tmp_path, site=site)
    output(
        sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index",
        "--disable-pip-version-check", "--target", site, made, cwd=tmp_path, site=site,
    )  # fmt: skip
    rows = json.loads(output(*pdhub, "plugins", "--json", cwd=tmp_path, site=site))
    (row,) = [r for r in rows if r["distribution"] == f"pdhub-{name}"]
    assert (row["kind"], row["name"], row["status"], row["error"]) == (kind, name, "ok", "")
    summary = output(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=made, site=site).splitlines()[
        -1
    ]
    assert "passed" in summary
    assert "failed" not in summary


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_writes_is_clean(kind: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    output(sys.executable, "-m", "pdhub", "new", kind, "a-b", "--dir", tmp_path, cwd=tmp_path, site=site)
    made = tmp_path / "pdhub-a-b"
    ruff = (sys.executable, "-m", "ruff")
    output(
        *ruff,
        "check",
        "--no-cache",
        "--line-length",
        "120",
        "--select",
        "E,F,W,I,B,UP,SIM,C4,RET,BLE",
        ".",
        cwd=made,
        site=site,
    )
    output(*ruff, "format", "--no-cache", "--line-length", "120", "--check", ".", cwd=made, site=site)
    output(sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "mypy", "src", cwd=made, site=site)
