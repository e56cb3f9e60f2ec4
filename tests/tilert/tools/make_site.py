"""Make a directory for PYTHONPATH with TileRT's Python code and NIXL: ``make_site.py DIRECTORY``.

TileRT's wheel is for Python 3.12, but only its router, connector and gate need that; the decode server, the receive
server, the wire protocol and the stub engine run on 3.11. Its kernels (``.so``) are left out. NIXL's progress thread
is made to sleep between two polls, as NIXL_PTHR_DELAY_US says: its Python API fixes that at 0, with which each agent,
idle or not, takes a whole core.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TILERT = "tilert==0.1.6.post3"
HERE = Path(__file__).parent
_DELAY = "agent_config.pthrDelay = 0\n"
_PATCHED = """agent_config.pthrDelay = int(__import__("os").environ.get("NIXL_PTHR_DELAY_US", "0"))\n"""


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    requirements = str(HERE / "requirements.txt")
    pip(sys.executable, "install", "--no-deps", "--upgrade", "--target", str(directory), "-r", requirements)
    with tempfile.TemporaryDirectory() as there:
        wheel = ["--python-version", "3.12", "--platform", "manylinux_2_28_x86_64", "--only-binary=:all:"]
        pip(sys.executable, "download", "--no-deps", *wheel, "--dest", there, TILERT)
        (path,) = Path(there).glob("*.whl")
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.startswith("tilert/") and not n.endswith(".so")]
            archive.extractall(directory, names)
    let_nixl_sleep(directory)


def let_nixl_sleep(directory: Path) -> None:
    """In all packages of NIXL that are there."""
    for path in directory.glob("nixl_cu1[23]/_api.py"):
        text = path.read_text()
        if _DELAY not in text and _PATCHED not in text:
            sys.exit(f"{path}: the line '{_DELAY.strip()}' is not there; look at this version of NIXL again")
        path.write_text(text.replace(_DELAY, _PATCHED))


def pip(python: str, *words: str) -> None:
    """Run an interpreter's pip."""
    subprocess.run([python, "-m", "pip", *words, "-q", "--disable-pip-version-check"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
