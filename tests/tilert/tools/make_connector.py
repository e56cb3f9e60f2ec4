"""Make an environment in which TileRT's own connector runs on a CPU: ``PYTHON3.12 make_connector.py DIRECTORY``.

It has Python 3.12, for which the connector is written, vLLM for CPUs, whose classes the connector is built on, NIXL,
and TileRT's Python code without its kernels. 2 GB, or 6 GB where pip finds only a torch for CUDA. Standard library
only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from make_site import TILERT, let_nixl_sleep, pip

VLLM = Path(__file__).parents[2] / "vllm" / "tools"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1", "nixl-cu13==1.5.1")
"""Which of the two is loaded depends on the torch that is there."""


def main(directory: Path) -> None:
    if sys.version_info[:2] != (3, 12):
        sys.exit(f"this is Python {sys.version.split()[0]}; TileRT's connector needs 3.12")
    venv.create(directory, with_pip=True)
    python = str(directory / "bin" / "python")
    pip(python, "install", "-r", str(VLLM / "requirements.txt"), "scipy==1.17.1")
    pip(python, "install", "--no-deps", "-r", str(VLLM / "requirements-nodeps.txt"), *NIXL)
    (packages,) = directory.glob("lib/python3*/site-packages")
    with tempfile.TemporaryDirectory() as there:
        pip(python, "download", "--no-deps", "--only-binary=:all:", "--dest", there, TILERT)
        (wheel,) = Path(there).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages, [name for name in archive.namelist() if not name.endswith(".so")])
    let_nixl_sleep(packages)
    subprocess.run([python, "-c", "import tilert.pd_vllm.prefill_connector"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
