"""Processes that are cheap to kill: they are forked from one that has imported everything."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from safety_config import ROUTER

_MORE_FILES = 40

_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload(
    [
        "pdhub.node.main",
        "pdhub.node.prefill",
        "pdhub.router.main",
        "pdhub.testing.toy",
        "pdhub.testing.faults",
        "tokenizers",
        "uvicorn.lifespan.on",
        "uvicorn.loops.uvloop",
        "uvicorn.protocols.http.httptools_impl",
        *(point.module for point in entry_points(group="pdhub")),
    ]
)


def _serve(config: str, name: str, log: str) -> None:
    """In the child: what `pdhub node` and `pdhub router` run."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # go when the process that forks goes
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    if name == ROUTER:
        from pdhub.router.main import run as run_router

        sys.exit(run_router(config))
    from pdhub.node.main import run as run_node

    sys.exit(run_node(config, name))


class Part:
    """One process of the tree, whichever it is just now.

    Args:
        name: in the configuration, or ``router``. port: of its HTTP server. config: the file; logs go beside it.
    """

    def __init__(self, name: str, port: int, config: Path) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self._config = config
        self._files: list[int] = []
        self.process: Any = None
        self.stopped = False

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def start(self) -> None:
        log = self._config.with_name(f"{self.name}.log")
        self.process = _fork.Process(target=_serve, args=(str(self._config), self.name, str(log)), daemon=True)
        self.process.start()
        self._files.clear()
        self.stopped = False

    def kill(self) -> None:
        """kill -9, and reap it. A stopped one too."""
        self.process.kill()
        self.process.join(10)
        self.stopped = False

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        if self.stopped:
            os.kill(self.pid, signal.SIGCONT)
            self.stopped = False

    def files(self) -> str:
        """Looked at when it is idle: whether it holds many more open files than in the beginning of its life."""
        now = len(os.listdir(f"/proc/{self.pid}/fd"))
        if len(self._files) < 5:
            self._files.append(now)
        much = now > max(self._files) + _MORE_FILES
        return f"{self.name} has {now} open files, once {max(self._files)}" if much else ""
