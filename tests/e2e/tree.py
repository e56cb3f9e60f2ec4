"""Real processes for end-to-end tests: each node, prefill instance and router is `python -m pdhub …`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def give_ports(topology: dict[str, Any]) -> dict[str, Any]:
    """Replace every port 0 by a free one; control ports too, so that a restarted node is where it was."""
    data = json.loads(json.dumps(topology))
    data["router"]["port"] = free_port()
    for node in [*data.get("prefill", []), *(n for p in data["pools"] for n in p["nodes"])]:
        node["port"] = free_port()
    for pool in data["pools"]:
        for node in pool["nodes"]:
            node["control_port"] = free_port()
    return data


class Tree:
    """The processes of one configuration, each started and killed on its own."""

    def __init__(self, topology: dict[str, Any], directory: Path) -> None:
        self.data = give_ports(topology)
        self.directory = directory
        self.path = directory / "config.yaml"
        self.path.write_text(yaml.safe_dump(self.data))
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.data['router']['port']}"

    @property
    def parts(self) -> dict[str, int]:
        """Name → HTTP port of everything but the router."""
        nodes = [*self.data.get("prefill", []), *(n for p in self.data["pools"] for n in p["nodes"])]
        return {n["name"]: n["port"] for n in nodes}

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start one part (``router`` or a node's name); does not wait."""
        verb = ["router", str(self.path)] if name == "router" else ["node", str(self.path), name]
        log = (self.directory / f"{name}.log").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", "pdhub", *verb], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        log.close()
        self.running[name] = process
        return process

    def start_all(self, timeout_s: float = 90) -> None:
        for name in [*self.parts, "router"]:
            self.start(name)
        self.wait_ready(timeout_s, whole=True)

    def wait_ready(self, timeout_s: float = 60, *, whole: bool = False) -> None:
        """Until the router can serve; ``whole``: until nothing is missing."""
        deadline, last = time.monotonic() + timeout_s, ""
        while time.monotonic() < deadline:
            for name, process in self.running.items():
                if process.poll() is not None and process.returncode not in (0, -signal.SIGKILL):
                    raise AssertionError(f"{name} exited with {process.returncode}:\n{self.log(name)}")
            status, last = get(f"{self.url}/ready")
            if status == 200 and not (whole and json.loads(last)["problems"]):
                return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout_s} s: {last}\n" + "\n".join(map(self.log, self.running)))

    def wait_up(self, name: str, timeout_s: float = 30) -> None:
        """Until a restarted part answers its own health."""
        deadline = time.monotonic() + timeout_s
        while get(f"http://127.0.0.1:{self.parts[name]}/health")[0] != 200:
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.05)

    def log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return f"--- {name}\n{path.read_text()[-3000:]}" if path.exists() else f"--- {name}: no log"

    def load(self, name: str) -> dict[str, Any]:
        status, text = get(f"http://127.0.0.1:{self.parts[name]}/load")
        assert status == 200, text
        return json.loads(text)

    def leaks(self, names: list[str] | None = None, timeout_s: float = 15) -> dict[str, Any]:
        """What is still held on the nodes after things settled; empty = nothing."""
        deadline = time.monotonic() + timeout_s
        pools = [n["name"] for p in self.data["pools"] for n in p["nodes"]]
        while True:
            loads = {name: self.load(name) for name in names or pools}
            held = {n: v for n, v in loads.items() if v.get("leases") or v.get("quarantined") or v.get("running")}
            if not held or time.monotonic() > deadline:
                return held
            time.sleep(0.1)

    def signal(self, name: str, number: int) -> None:
        self.running[name].send_signal(number)

    def kill(self, name: str) -> None:
        """kill -9 and reap."""
        self.running[name].kill()
        self.running.pop(name).wait(10)

    def close(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
                process.terminate()
        deadline = time.monotonic() + 10
        for process in self.running.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)


def get(url: str, timeout_s: float = 5) -> tuple[int, str]:
    """GET; status 0 if nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)
