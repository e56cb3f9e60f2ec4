"""`pdhub up` on a configuration, with progress on standard output while servers load."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

SAY_EVERY_S = 15.0


class Up:
    """A running tree. Use as ``with``; :meth:`wait` for it. ``log`` has what all its processes wrote.

    Args:
        document: the configuration. directory: for NAME.yaml and NAME.log.
    """

    def __init__(self, document: Mapping[str, Any], directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log, self.path = directory / f"{name}.log", directory / f"{name}.yaml"
        self.path.write_text(yaml.safe_dump(dict(document), sort_keys=False))
        self.members = members(document)
        self._child: subprocess.Popen[bytes] | None = None
        self._begin = time.monotonic()

    def __enter__(self) -> Up:
        self._begin = time.monotonic()
        with self.log.open("ab") as log:
            argv = [sys.executable, "-m", "pdhub", "up", str(self.path)]
            self._child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child is not None
        for patience_s in (20, 10):
            if self._child.poll() is None:
                self._child.terminate()  # the second time it kills what it started
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(patience_s)
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait(10)

    def wait(self, deadline: float, ready: dict[str, float]) -> None:
        """Until every member answers.

        Args:
            deadline: on the monotonic clock. ready: gets each member's seconds, as soon as it answers.

        Raises:
            RuntimeError: the tree ended. TimeoutError: the deadline is over.
        """
        assert self._child is not None
        said = time.monotonic()
        while missing := [name for name in self.members if name not in ready]:
            for name in missing:
                if fetch(self.members[name]) is not None:
                    ready[name] = round(time.monotonic() - self._begin, 1)
                    print(f"{name} is ready after {ready[name]} s", flush=True)
            if self._child.poll() is not None:
                raise RuntimeError(f"pdhub up ended\n{self.tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready: {', '.join(missing)}\n{self.tail()}")
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                print(f"waits for {', '.join(missing)}: {self.tail(1)[-200:]}", flush=True)
            time.sleep(0.5)

    def tail(self, count: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


def members(document: Mapping[str, Any]) -> dict[str, str]:
    """The address at which each process of a configuration says that it is ready, by its name."""
    nodes = [*document["prefill"], *(node for pool in document["pools"] for node in pool["nodes"])]
    out = {node["name"]: f"http://127.0.0.1:{node['port']}/health" for node in nodes}
    return {**out, "router": f"http://127.0.0.1:{document['router']['port']}/ready"}


def fetch(url: str) -> str | None:
    """The body; None if it does not answer with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return str(reply.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def fetch_json(url: str) -> Any:
    """The document; None if there is none."""
    return json.loads(fetch(url) or "null")
