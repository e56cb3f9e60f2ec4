"""The direction of imports, and how light the host is."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "vllm", "fastapi", "uvicorn", "aiohttp", "numpy", "rich", "yaml", "pydantic")


def loaded(statement: str, *watched: str) -> list[str]:
    """Which of the watched modules a fresh interpreter has after ``statement``."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(set({list(watched)!r}) & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_import_linter_is_content() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_pdhub_is_light() -> None:
    assert loaded("import pdhub", *HEAVY) == []


def test_the_contract_brings_no_server_and_no_torch() -> None:
    assert loaded("import pdhub.api", "torch", "transformers", "vllm", "fastapi", "uvicorn", "aiohttp", "numpy") == []


def test_listing_plugins_brings_no_torch() -> None:
    assert loaded("import pdhub.registry as r; r.load(warn=False)", "torch", "transformers", "vllm", "fastapi") == []


def test_help_imports_no_part_of_the_host() -> None:
    watched = (
        "pdhub.registry",
        "pdhub.router",
        "pdhub.node",
        "pdhub.config.build",
        "torch",
        "fastapi",
        "rich",
        "pydantic",
    )
    run = "import sys\ntry:\n    from pdhub.cli import main; main(['--help'])\nexcept SystemExit:\n    pass"
    assert loaded(run, *watched) == []


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


OPEN_TO_PLUGINS = ("pdhub.api", "pdhub.onesided")
"""The contract, and what it is built with where a native library has no rights of its own (docs/adr/0005)."""


@pytest.mark.parametrize(
    "package",
    sorted(p.parent for kind in ("engines", "plugins") for p in ROOT.glob(f"{kind}/*/src")),
    ids=lambda p: p.name,
)
def test_plugins_import_only_the_contract(package: Path) -> None:
    for path in (package / "src").rglob("*.py"):
        for name in imports(path):
            if name == "pdhub" or name.startswith("pdhub."):
                assert name.startswith(OPEN_TO_PLUGINS), f"{path.relative_to(ROOT)} imports {name}"


def test_only_settings_reads_the_environment() -> None:
    for path in (ROOT / "pdhub").rglob("*.py"):
        if path.relative_to(ROOT).parts[1] != "testing" and path.name != "settings.py":
            for word in ("os.environ", "getenv"):
                assert word not in path.read_text(), f"{path.relative_to(ROOT)} reads the environment"
