"""A router process and SIGHUP: it reloads, unless its terminal was closed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

CONFIG = """\
model: {{name: m}}
router: {{port: {port}, reload_interval_s: 0}}
pools:
  - {{name: a, engine: {{type: openai}}, nodes: [{{name: a-0, port: 9, launch: false}}]}}
policy: {{type: {policy}}}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Router:
    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.port = path, free_port()
        self.write("slo")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdhub", "router", str(path)], stderr=subprocess.PIPE, text=True, **options
        )
        self.until(lambda: self.policy()["name"] == "slo")

    def write(self, policy: str) -> None:
        self.path.write_text(CONFIG.format(port=self.port, policy=policy))

    def policy(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5) as reply:
                found = json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                found = json.load(error)
        except OSError:
            return {"name": None}
        policy: dict[str, Any] = found["policy"]
        return policy

    def until(self, check: Callable[[], bool], limit_s: float = 30.0) -> None:
        deadline = time.monotonic() + limit_s
        while not check():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)


@contextlib.contextmanager
def running(path: Path, **options: Any) -> Iterator[Router]:
    router = Router(path, **options)
    try:
        yield router
    finally:
        router.process.kill()
        router.process.communicate()


def test_sighup_reloads_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    with running(tmp_path / "r.yaml", start_new_session=True) as router:
        router.write("round_robin")
        router.process.send_signal(signal.SIGHUP)
        router.until(lambda: router.policy()["name"] == "round_robin")
        router.write("no-such")
        router.process.send_signal(signal.SIGHUP)
        router.until(lambda: router.policy()["reload"]["result"] == "invalid")
        assert router.policy()["name"] == "round_robin"
        assert "no-such" in router.policy()["reload"]["problem"]
        router.process.send_signal(signal.SIGTERM)
        _, err = router.process.communicate(timeout=20)
        assert router.process.returncode == 0
        assert "policy round_robin is live" in err
        assert "the new configuration is not used (invalid)" in err


def test_a_closed_terminal_stops_it(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    with running(tmp_path / "r.yaml", stdin=theirs, start_new_session=True, preexec_fn=take_terminal) as router:
        os.close(theirs)
        router.write("round_robin")
        router.process.send_signal(signal.SIGHUP)  # from somewhere else: the terminal is still there
        router.until(lambda: router.policy()["name"] == "round_robin")
        os.close(ours)
        assert router.process.wait(20) == 0
