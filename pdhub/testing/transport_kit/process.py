"""A process that holds one side of the transport, to be stopped, resumed and killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdhub.config.settings import importing_environment
from pdhub.testing.transport_kit.pair import PATIENCE_S, until


class SideProcess:
    """Runs :mod:`pdhub.testing.transport_writer`.

    Args:
        name, options: the transport, as in YAML.
        plugins: modules that register it, where its package is not installed.
    """

    def __init__(self, name: str, options: dict[str, Any], plugins: Sequence[str] = ()) -> None:
        arguments = ["--type", name, "--config", json.dumps(options)]
        for plugin in plugins:
            arguments += ["--plugin", plugin]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdhub.testing.transport_writer", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=importing_environment(),
        )
        self.pid = self._process.pid

    def ask(self, do: str, **fields: Any) -> Any:
        """Send a command and return its answer. AssertionError if it failed or nothing came."""
        self.send(do, **fields)
        return self.answer()

    def send(self, do: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 2 * PATIENCE_S)
        assert ready, "the other process did not answer"
        line = self._process.stdout.readline()
        assert line, "the other process ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["ok"]

    def stop(self) -> None:
        """SIGSTOP, and wait until every thread of it stands."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        until(lambda: all(_state(task) in "Tt" for task in tasks.iterdir()), "stopping the other process")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and reap it."""
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Let it close its transport and exit; its exit status, negative for a signal."""
        self.ask("close")
        return self._process.wait(2 * PATIENCE_S)

    def close(self) -> None:
        """End it, whatever state it is in. Idempotent."""
        if self._process.poll() is None:
            self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue  # a command that it never read


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:  # the thread has just ended
        return "T"
