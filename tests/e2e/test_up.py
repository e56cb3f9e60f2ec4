"""`pdhub up` with real nodes and a real router: serves, heals itself, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from pdhub.testing import toy
from pdhub.testing.hub import toy_topology

pytestmark = pytest.mark.e2e


class Up:
    def __init__(self, directory: Path) -> None:
        data = toy_topology()
        data["plugins"] = {"modules": ["pdhub.testing.toy"]}
        data["model"]["tokenizer"] = str(toy.write_tokenizer(directory / "tokenizer"))
        config = directory / "hub.yaml"
        config.write_text(yaml.safe_dump(data))
        self.log = directory / "log"
        with self.log.open("wb") as file:
            command = [sys.executable, "-m", "pdhub", "up", str(config), "--set", "router.port=0"]
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        self.url = ""

    def until_it_serves(self) -> None:
        serving = self.until(lambda: re.search(r"serving toy at (\S+)", self.log.read_text()))
        self.url = serving[1]

    def until(self, condition: Callable[[], object], within_s: float = 60.0) -> re.Match[str]:
        deadline = time.monotonic() + within_s
        while not (result := condition()):
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return result  # type: ignore[return-value]

    def ask(self) -> str | None:
        """The answer's text; None if the endpoint has none just now."""
        body = {"model": "toy", "prompt": "hello", "max_tokens": 8}
        request = urllib.request.Request(
            f"{self.url}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return str(json.load(answer)["choices"][0]["text"])
        except OSError:
            return None

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def served_by(self, word: str) -> psutil.Process:
        """The process of one member, not its guard."""
        return next(p for p in self.below() if word in p.cmdline() and not any("guard.py" in w for w in p.cmdline()))


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    one = Up(tmp_path)
    below: list[psutil.Process] = []
    try:
        one.until_it_serves()
        below += one.below()
        yield one
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            below += one.below()
        one.process.kill()
        one.process.wait()
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_one_ctrl_c_stops_all(up: Up) -> None:
    assert up.ask() is not None
    below = up.below()
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0
    assert not any(process.is_running() for process in below)
    log = up.log.read_text()
    assert log.index("router") < log.rindex("• stopped")
    assert "killed" not in log


@pytest.mark.parametrize("word", ["node", "router"])
def test_a_killed_member_comes_back_without_a_hand(up: Up, word: str) -> None:
    expected = up.ask()
    assert expected is not None
    up.served_by(word).kill()
    up.until(lambda: "killed by SIGKILL; starting again" in up.log.read_text())
    up.until(lambda: up.ask() == expected)
    assert up.process.poll() is None


def test_kill_9_of_up_leaves_no_process(up: Up) -> None:
    below = up.below()
    assert len(below) >= 8
    os.kill(up.process.pid, signal.SIGKILL)
    up.process.wait()
    up.until(lambda: not any(process.is_running() for process in below), within_s=20)
