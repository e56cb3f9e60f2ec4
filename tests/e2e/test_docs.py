"""The commands of the walk-throughs work, in order, as a reader types them.

A block of shell after ``<!-- ci -->`` is run. All blocks of a page are one script in an empty directory, with an
environment of its own that sees this one's packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- ci -->\n```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if blocks(page))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables that put a fresh environment first: what is installed goes there, nothing is downloaded."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    inner = venv / "bin" / "python"
    # --python before the verb, the rest behind it: what is needed is here already, and nothing is downloaded
    quiet = "--no-deps --no-index --no-build-isolation --disable-pip-version-check -q"
    pip = f'verb=$1; shift; exec {sys.executable} -m pip --python {inner} "$verb" {quiet} "$@"'
    commands = {"pip": pip} | {name: f'exec {inner} -m {name} "$@"' for name in ("pytest", "pdhub")}
    for name, command in commands.items():
        script = venv / "bin" / name
        script.write_text(f"#!/bin/sh\n{command}\n")
        script.chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PDHUB_", "PYTHON"))},
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work(page: Path, environment: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "work"
    place.mkdir()
    script = "\n".join(["set -eum", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT", *blocks(page)])
    done = subprocess.run(
        ["bash", "-c", script], cwd=place, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    if "hellohel" in page.read_text():
        assert '"text":"hellohel"' in done.stdout


def test_the_walk_throughs_are_run() -> None:
    assert {"first-engine", "first-transport", "first-policy"} <= {page.stem for page in PAGES}
