"""A running tree of real vLLM servers: `pdhub up` on a configuration, and what tests do to its processes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import yaml
from calls import get, post
from kinds import KINDS, Kind
from topology import CHOOSE, topology

_GAUGES = {"running": "num_requests_running", "waiting": "num_requests_waiting", "kv_usage": "kv_cache_usage_perc"}
READY_WITHIN_S = 600


class Server:
    """One vLLM server of the tree, whichever process that is just now (`pdhub up` restarts what dies)."""

    def __init__(self, name: str, port: int, world: World) -> None:
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._world = world

    @property
    def pid(self) -> int:
        """Of the API server, which listens on the port. Its engine is a child of it."""
        for process in psutil.Process(self._world.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                guard = any(word.endswith("guard.py") for word in words)
                if not guard and "serve" in words and str(self.port) in words:
                    return process.pid
        raise AssertionError(f"{self.name} has no process\n{self._world.log()}")

    @property
    def engine_pid(self) -> int:
        """Of the engine core, which has the model and the KV cache."""
        for child in psutil.Process(self.pid).children(recursive=True):
            if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline()):
                return child.pid
        raise AssertionError(f"{self.name} has no engine\n{self._world.log()}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """The API server. `pdhub up` ends the engine with it, then starts both again."""
        os.kill(self.pid, number)

    def alive(self) -> bool:
        return get(f"{self.url}/health")[0] == 200

    def wait_up(self, timeout_s: float = 300) -> None:
        """Until it answers its health, after a restart."""
        wait_for(self.alive, timeout_s, lambda: f"{self.name} does not answer\n{self._world.log()}")
        _spread(self.pid)

    def metrics(self) -> dict[str, float]:
        """vLLM's own, summed over labels, without the prefix ``vllm:``."""
        status, text = get(f"{self.url}/metrics")
        assert status == 200, text
        out: dict[str, float] = {}
        for name, value in re.findall(r"^vllm:(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
            out[name] = out.get(name, 0.0) + float(value)
        return out

    def gauges(self) -> dict[str, float]:
        """``running``, ``waiting`` (requests), ``kv_usage`` (0 to 1)."""
        found = self.metrics()
        return {name: found[theirs] for name, theirs in _GAUGES.items()}

    def idle(self) -> bool:
        return not any(self.gauges().values())

    def wait_idle(self, timeout_s: float = 60) -> None:
        """Until nothing runs, waits, or holds KV."""
        wait_for(self.idle, timeout_s, lambda: f"{self.name} is not idle: {self.gauges()}")

    def log(self) -> str:
        """The end of the tree's log."""
        return self._world.log()

    def transferred(self) -> float:
        """Prompt tokens whose KV came over the wire to this server, so far."""
        _, text = get(f"{self.url}/metrics")
        found = re.findall(
            r'^vllm:prompt_tokens_by_source_total\{.*source="external_kv_transfer".*\} (\S+)$', text, re.M
        )
        return sum(map(float, found))


class World:
    """One tree. The files are in ``directory``: ``config.yaml``, ``up.log``.

    Args:
        name: of :data:`kinds.KINDS`. pools: of the kind's. vllm: the `vllm` command.
        change: edits the configuration before it is written.
    """

    def __init__(
        self,
        name: str,
        pools: tuple[str, ...],
        model: Path,
        vllm: Path,
        directory: Path,
        change: Callable[[dict[str, Any]], None] = lambda document: None,
    ) -> None:
        self.name = name
        self.kind: Kind = KINDS[name]
        self.pools = pools
        self.data = topology(self.kind, pools, model, vllm)
        change(self.data)
        self.directory = directory
        self.path = directory / "config.yaml"
        self.path.write_text(yaml.safe_dump(self.data))
        self._up: subprocess.Popen[bytes] | None = None

    @property
    def router_url(self) -> str:
        return f"http://127.0.0.1:{self.data['router']['port']}"

    @property
    def pid(self) -> int:
        """Of `pdhub up`."""
        assert self._up is not None
        return self._up.pid

    @cached_property
    def servers(self) -> dict[str, Server]:
        parts = [*self.data["prefill"], *(node for pool in self.data["pools"] for node in pool["nodes"])]
        return {part["name"]: Server(part["name"], part["port"], self) for part in parts}

    def server(self, name: str) -> Server:
        """``prefill-POOL``, or ``POOL`` for its decode node."""
        return self.servers[name]

    @property
    def single(self) -> Server:
        """The server that prefills itself: what it answers, asked directly, is what every pool must answer."""
        return self.servers["whole"]

    def via(self, pool: str) -> dict[str, str]:
        """Headers that make the router take this pool, and no other."""
        return {CHOOSE: pool}

    def start(self) -> None:
        with (self.directory / "up.log").open("ab") as log:
            self._up = subprocess.Popen(
                [sys.executable, "-m", "pdhub", "up", str(self.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_us,
            )
        self.wait_ready(READY_WITHIN_S)

    def wait_ready(self, timeout_s: float = 300) -> None:
        """Until the router misses nothing: all servers are up and every pair has passed its self-check."""
        last = ["nothing yet"]

        def ready() -> bool:
            assert self._up is not None
            assert self._up.poll() is None, f"pdhub up ended\n{self.log()}"
            status, last[0] = get(f"{self.router_url}/ready")
            return status == 200 and not _missing(json.loads(last[0]))

        wait_for(ready, timeout_s, lambda: f"not ready: {last[0]}\n{self.log()}")
        for server in self.servers.values():
            _spread(server.pid)

    def ready(self) -> Mapping[str, Any]:
        """The router's `/ready` document."""
        return json.loads(get(f"{self.router_url}/ready")[1])

    def log(self, lines: int = 60) -> str:
        """The end of what `pdhub up`, the router and all servers wrote."""
        path = self.directory / "up.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "no log"

    def warm(self) -> None:
        """One answer through every pool."""
        for pool in self.pools:
            body = {"model": "m", "prompt": "warm up", "max_tokens": 2}
            status, text = post(f"{self.router_url}/v1/completions", body, self.via(pool))
            assert status == 200, f"{pool}: {status} {text}\n{self.log()}"

    def close(self) -> None:
        if self._up is None or self._up.poll() is not None:
            return
        self._up.terminate()
        try:
            self._up.wait(60)
        except subprocess.TimeoutExpired:
            self._up.kill()  # its guards end the servers
            self._up.wait(10)


def wait_for(what: Callable[[], bool], timeout_s: float, why: Callable[[], str]) -> None:
    """Poll until true; the reason is asked for when time is up."""
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"after {timeout_s:g} s: {why()}"
        time.sleep(0.1)


def _end_with_us() -> None:
    """In the child: SIGTERM when the test run is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


def _missing(document: Mapping[str, Any]) -> bool:
    return bool(document["problems"]) or any(verdict != "good" for verdict in document["pairs"].values())


def _spread(pid: int) -> None:
    """NIXL pins each engine on a CPU to the machine's last core, all of them to the same: let them have all cores."""
    cores = set(range(os.cpu_count() or 1))
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            for thread in process.threads():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(thread.id, cores)
