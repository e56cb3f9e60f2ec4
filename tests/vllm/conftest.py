"""Fixtures of the tests on real vLLM servers. See README.md in this directory for how to use them.

Nothing here is collected unless ``PDHUB_VLLM_VENV`` names an environment with vLLM; ``make test-vllm`` makes one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fault_table import TABLE, keep, table
from kinds import KINDS
from world import World

HERE = Path(__file__).parent


def pytest_addoption(parser):
    parser.addoption("--vllm-full", action="store_true", help="everything, not the selection that fits in 15 minutes")


def pytest_configure(config):
    config.addinivalue_line("markers", "world(*names): trees on which the test runs (kinds.KINDS); default is tiny")
    config.addinivalue_line("markers", "kill(name): which kill it is, of test_faults_kills.IN_CI")


def pytest_terminal_summary(terminalreporter, config):
    if TABLE:
        terminalreporter.write_sep("-", "faults")
        terminalreporter.write_line(table())
        if config.getoption("--vllm-full", default=False):
            keep()


def pytest_ignore_collect(collection_path, config):
    return True if _venv() is None and collection_path.suffix == ".py" else None


def pytest_generate_tests(metafunc):
    if "world" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("world")
        metafunc.parametrize("world", marker.args if marker else ["tiny"], indirect=True, scope="session")
    if "pool" in metafunc.fixturenames:
        metafunc.parametrize("pool", ["pull", "push", "mooncake", "whole"])


def pytest_collection_modifyitems(config, items):
    ours = [item for item in items if HERE in item.path.parents]
    missing = [item for item in ours if not _fits(item)]
    config.hook.pytest_deselected(items=missing)
    items[:] = [item for item in items if item not in missing]
    for item in ours:
        if item.get_closest_marker("timeout") is None:
            # The first test of a tree waits for its servers; in the full run one test computes 50 long prompts.
            item.add_marker(pytest.mark.timeout(2400 if config.getoption("--vllm-full", default=False) else 900))


def _fits(item):
    """Has the tree this pool?"""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return "pool" not in params or params["pool"] in KINDS[params.get("world", "tiny")].pools


@pytest.fixture(scope="session")
def full(pytestconfig):
    """Everything (`make test-vllm-full`), or the selection of CI?"""
    return bool(pytestconfig.getoption("--vllm-full", default=False))


@pytest.fixture(scope="session")
def vllm():
    """The `vllm` command of the environment."""
    command = _venv() / "bin" / "vllm"
    assert command.exists(), f"{command} is not there: make test-vllm makes it"
    return command


@pytest.fixture(scope="session")
def model(request):
    """Function: directory of a model by its name, made once into the user's cache."""

    def find(name):
        return request.getfixturevalue("smollm2") if name == "smollm2" else _tiny(name)

    return find


@pytest.fixture(scope="session")
def world(request, model, vllm, tmp_path_factory):
    """The running tree that the test's marker ``world`` names: started once for all its tests, one at a time.

    Tests that kill servers leave it ready again (``world.wait_ready()``), also when they fail.
    """
    name = request.param
    kind = KINDS[name]
    if "mooncake" in kind.pools and (why := _no_mooncake(vllm)):
        if os.environ.get("PDHUB_VLLM_REQUIRE") == "all":
            pytest.fail(why)
        pytest.skip(why)
    only = os.environ.get("PDHUB_VLLM_POOLS")
    pools = tuple(pool for pool in kind.pools if only is None or pool in only.split(",") or pool == "whole")
    found = World(name, pools, model(kind.model), vllm, tmp_path_factory.mktemp(name))
    try:
        found.start()
        yield found
    finally:
        found.close()


@pytest.fixture(autouse=True)
def _pool_is_there(request):
    """``PDHUB_VLLM_POOLS`` may leave some out."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "pool" in params and params["pool"] not in request.getfixturevalue("world").pools:
        pytest.skip("left out by PDHUB_VLLM_POOLS")


def _venv():
    named = os.environ.get("PDHUB_VLLM_VENV")
    return Path(named).absolute() if named else None


def _tiny(kind):
    from pdhub.config.settings import cache_dir

    script = HERE / "tools" / "tiny_models.py"
    key = hashlib.sha256(script.read_bytes()).hexdigest()[:12]
    out = cache_dir() / "models" / f"tiny-{kind}-{key}"
    if not (out / "config.json").exists():
        half = out.with_name(f"{out.name}.{os.getpid()}")
        subprocess.run([sys.executable, str(script), kind, str(half)], check=True)
        shutil.rmtree(out, ignore_errors=True)
        half.rename(out)
    return out


def _no_mooncake(vllm):
    """Why it cannot run here; empty if it can."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        return f"Mooncake needs the system's libibverbs: {error}"
    found = subprocess.run([vllm.parent / "python", "-c", "import mooncake.engine"], capture_output=True, text=True)
    return "" if found.returncode == 0 else f"Mooncake does not load: {found.stderr[-300:]}"
