"""The wheels work where the repository is not: a clean environment lists every plugin and finds the packaged files."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT, *(path.parent for kind in ("engines", "plugins") for path in ROOT.glob(f"{kind}/*/pyproject.toml"))]


def output(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheels; third parties come from this environment."""
    place = tmp_path_factory.mktemp("dist")
    for package in PACKAGES:
        output(
            sys.executable, "-m", "build", "-q", "--wheel", "--no-isolation", "--outdir", place / "wheels", package,
            cwd=place,
        )  # fmt: skip
    wheels = sorted((place / "wheels").glob("*.whl"))
    assert len(wheels) == len(PACKAGES)
    output(sys.executable, "-m", "venv", "--without-pip", place / "venv", cwd=place)
    inner = place / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "-q", "--python", inner, "--disable-pip-version-check")
    output(*pip, "install", "--no-deps", "--no-index", *wheels, cwd=place)
    site = Path(output(inner, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip())
    # a path line is appended as it is: .pth files over there, and with them editable installs, are not followed
    (site / "third_parties.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return inner


def test_every_plugin_is_listed_and_sound(python: Path, tmp_path: Path) -> None:
    rows = json.loads(output(python.with_name("pdhub"), "plugins", "--json", cwd=tmp_path))
    assert [row for row in rows if row["status"] != "ok"] == []
    assert {row["name"] for row in rows} >= {"transformers", "openai", "shm", "tcp", "slo_threshold", "local"}
    distributions = {row["distribution"] for row in rows}
    assert {"pdhub", "pdhub-transformers"} <= distributions


def test_the_installed_copy_is_used_and_holds_its_files(python: Path, tmp_path: Path) -> None:
    code = (
        "import pdhub, pdhub.operate.launcher as launcher; from pdhub.operate.quickstart.source import config_file; "
        "print(pdhub.__file__); print(config_file()); print(launcher._GUARD.is_file())"
    )
    package, config, guard = output(python, "-c", code, cwd=tmp_path).splitlines()
    environment = python.parents[1]
    assert Path(package).is_relative_to(environment)
    assert Path(config).is_relative_to(environment)
    assert Path(config).read_bytes() == (ROOT / "configs" / "quickstart.yaml").read_bytes()
    assert guard == "True"


def test_a_package_can_be_written_from_the_wheel(python: Path, tmp_path: Path) -> None:
    output(python.with_name("pdhub"), "new", "engine", "mine", cwd=tmp_path)
    assert (tmp_path / "pdhub-mine" / "pyproject.toml").is_file()
