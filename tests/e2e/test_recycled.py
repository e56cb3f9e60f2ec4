"""`pdhub up` starts a decode node again whose KV nobody will ever free, and nothing else."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from tree import get

from pdhub.operate.ports import free_port

pytestmark = pytest.mark.e2e
STUB = Path(__file__).with_name("stub_vllm.py")


class Up:
    """One prefill instance and two decode nodes of stub servers, behind a router."""

    def __init__(self, directory: Path) -> None:
        pytest.importorskip("pdhub_vllm")
        taken: set[int] = set()
        self.ports = {
            name: free_port("127.0.0.1", taken, random.Random()) for name in ("router", "p0", "d0", "d1", "s")
        }
        self.held = directory / "held"
        self.held.mkdir()
        serve = {"command": [sys.executable, "-S", str(STUB)], "env": {"STUB_HELD": str(self.held)}}
        config = {"handoff": "nixl_push", "side_channel_port": self.ports["s"], "serve": serve}
        data = {
            "version": 1,
            "model": {"name": "m"},
            "router": {
                "port": self.ports["router"],
                "pair_check": False,
                "probe_interval_s": 0.2,
                "recycle": {"after_s": 0.5},
            },
            "prefill": [{"name": "p0", "port": self.ports["p0"], "engine": {"type": "vllm", "config": config}}],
            "pools": [
                {
                    "name": "split",
                    "engine": {"type": "vllm", "config": config},
                    "nodes": [{"name": name, "port": self.ports[name]} for name in ("d0", "d1")],
                }
            ],
            "policy": {"type": "round_robin"},
        }
        path, self.log = directory / "hub.yaml", directory / "log"
        path.write_text(yaml.safe_dump(data))
        with self.log.open("wb") as file:
            command = [sys.executable, "-m", "pdhub", "up", str(path)]
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    @property
    def out(self) -> str:
        return self.log.read_text()

    def until(self, condition: Callable[[], object], within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, self.out
            assert self.process.poll() is None, self.out
            time.sleep(0.05)

    def ready(self) -> dict:
        return json.loads(get(f"http://127.0.0.1:{self.ports['router']}/ready")[1])

    def pids(self) -> dict[str, int]:
        """Of the servers themselves."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if words[2:3] == [str(STUB)]:
                    port = int(words[words.index("--port") + 1])
                    found[next(name for name, value in self.ports.items() if value == port)] = process.pid
        return found

    def strand(self, name: str) -> None:
        """From now on the process that serves it now holds KV for nobody."""
        new = self.held / "new"
        new.write_text(str(self.pids()[name]))
        new.rename(self.held / str(self.ports[name]))


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    one = Up(tmp_path)
    below: list[psutil.Process] = []
    try:
        one.until(lambda: "serving m at" in one.out)
        one.until(lambda: not one.ready()["problems"])
        below += psutil.Process(one.process.pid).children(recursive=True)
        yield one
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            below += psutil.Process(one.process.pid).children(recursive=True)
        one.process.kill()
        one.process.wait()
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_it_is_started_again_and_nothing_else_is(up: Up) -> None:
    before = up.pids()
    assert set(before) == {"p0", "d0", "d1"}
    up.strand("d0")
    up.until(lambda: up.out.count("• ready after") == 5)
    up.until(lambda: not up.ready()["problems"])
    after = up.pids()
    assert {name for name in before if before[name] != after[name]} == {"d0"}
    assert "stopping, to be started again: 25.0% of its KV memory was held for nobody" in up.out
    assert "starting again in" not in up.out  # which is what a failure says
    assert up.ready()["stranded"] == {}


def test_two_go_one_after_the_other(up: Up) -> None:
    before = up.pids()
    up.strand("d0")
    up.strand("d1")
    up.until(lambda: up.out.count("• ready after") == 6)
    up.until(lambda: not up.ready()["problems"])
    after = up.pids()
    assert {name for name in before if before[name] != after[name]} == {"d0", "d1"}
    lines = [line for line in up.out.splitlines() if "to be started again: 25" in line or "• ready after" in line]
    assert ["ready" in line for line in lines[-4:]] == [False, True, False, True]
