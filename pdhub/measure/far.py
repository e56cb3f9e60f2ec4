"""This side's handle on the target process."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from pdhub.api import Grant, PeerMetadata
from pdhub.api.errors import PluginError
from pdhub.config.settings import importing_environment


class FarSide:
    """Starts ``pdhub.measure.target``. Raises PluginError with its message if the transport does not open there."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdhub.measure.target", name, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=importing_environment(),
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def landing(self, nbytes: int, device: str) -> tuple[Grant, PeerMetadata]:
        """A fresh landing and how to reach it."""
        found = self._ask("landing", nbytes=nbytes, device=device)
        grant = Grant(found["region"], nbytes, base64.b64decode(found["grant"]))
        return grant, PeerMetadata(self._name, base64.b64decode(found["metadata"]))

    def checksum(self, grant: Grant) -> int | None:
        """CRC-32 of a landing; None if it cannot be read."""
        found: int | None = self._ask("checksum", region=grant.region_id)
        return found

    def free(self, grant: Grant) -> None:
        self._ask("free", region=grant.region_id)

    def cpu_s(self) -> float:
        """Processor seconds of that process so far, all threads."""
        return float(self._ask("cpu_s"))

    def close(self) -> None:
        """End it. Idempotent."""
        if self._process.poll() is None:
            with contextlib.suppress(PluginError, OSError):  # it is ended below, whatever it says
                self._ask("close")
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _ask(self, do: str, **fields: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "it ended without an answer"}
        if "error" in answer:
            raise PluginError(f"the target's process: {answer['error']}")
        return answer["ok"]
