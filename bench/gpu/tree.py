"""A tree of real servers on GPUs: its configuration, and `pdhub up` on it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROUTER, PREFILL, NODE, PULL, WHOLE = 8000, 8100, 8200, 8300, 8400
GRAPHS = ("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}')
"""Decode runs in CUDA graphs; nothing is compiled, which would take minutes."""

CHOOSE = "x-pool"
"""Header that names the pool."""


@dataclass(frozen=True)
class Kind:
    """One tree.

    Args:
        model: directory. dtype: of weights and KV. random: weights are random.
        pools: of ``nodes`` (pdhub's hand-over), ``pull`` (vLLM's NixlConnector), ``whole`` (no hand-over).
        transport: of the nodes, as in YAML. verify: digests.
        context: prompt plus output. step: tokens that prefill computes at once.
        prefill_kv, decode_kv: bytes of the servers' caches, as vLLM reads them.
        gpus: prefill's, and that of everything else.
        landings: of the node. args: further arguments of vLLM servers.
    """

    model: Path
    dtype: str
    random: bool
    pools: Sequence[str]
    transport: dict[str, Any]
    gpus: tuple[int, int]
    context: int = 2048
    step: int = 2048
    prefill_kv: str = "1G"
    decode_kv: str = "1G"
    landings: int = 4
    verify: bool = False
    args: Sequence[str] = ()
    engine: dict[str, Any] = field(default_factory=dict)


def document(kind: Kind) -> dict[str, Any]:
    """What a user would write."""
    first, second = kind.gpus
    prefill = _vllm(kind, first, kind.prefill_kv, "nixl" if "pull" in kind.pools else "pdhub", ["--enforce-eager"])
    prefill["config"]["pdhub_port"] = 5580
    pools: list[dict[str, Any]] = []
    if "nodes" in kind.pools:
        engine = {"slots": 1, "device": f"cuda:{second}", "dtype": kind.dtype, "max_context": kind.context}
        engine |= {"weights": "random" if kind.random else "file", **kind.engine}
        node = {"name": "node-0", "port": NODE}
        pools.append(
            {
                "name": "nodes",
                "landings": kind.landings,
                "engine": {"type": "transformers", "config": engine},
                "nodes": [node],
            }
        )
    if "pull" in kind.pools:
        engine = _vllm(kind, second, kind.decode_kv, "nixl")
        pools.append({"name": "pull", "engine": engine, "nodes": [{"name": "decode-0", "port": PULL}]})
    if "whole" in kind.pools:
        engine = _vllm(kind, second, kind.decode_kv, "none")
        pools.append({"name": "whole", "engine": engine, "nodes": [{"name": "whole-0", "port": WHOLE}]})
    rules = [
        {"name": p["name"], "match": {"headers": {CHOOSE: p["name"]}}, "pools": [p["name"]], "fallback": []}
        for p in pools
    ]
    return {
        "version": 1,
        "model": {"name": "m", "path": str(kind.model)},
        # random weights differ from engine to engine, and so would what a pair answers
        "router": {"port": ROUTER, "debug_headers": True, "pair_check": not kind.random},
        "handoff": {"transport": kind.transport, "staging_bytes": 1 << 30, "verify": kind.verify},
        "prefill": [
            {
                "name": "prefill-0",
                "port": PREFILL,
                "engine": prefill,
                "pools": [p for p in kind.pools if p != "whole"],
            }
        ],
        "pools": pools,
        "policy": {"type": "round_robin", "rules": rules},
    }


def _vllm(kind: Kind, gpu: int, kv: str, handoff: str, graphs: Sequence[str] = GRAPHS) -> dict[str, Any]:
    args = [
        "--dtype", kind.dtype,
        "--kv-cache-memory-bytes", kv,
        "--gpu-memory-utilization", "0.1",  # only checked: the bytes above are what is taken
        "--max-num-batched-tokens", str(kind.step),
        "--disable-uvicorn-access-log",
        "--kernel-config", '{"enable_flashinfer_autotune": false}',
        *(("--load-format", "dummy") if kind.random else ()),
        *graphs,
        *kind.args,
    ]  # fmt: skip
    env = {
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRITON_F32_DEFAULT": "ieee",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled at the first start, for a minute and a half
    }
    serve = {"command": [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"], "args": args, "env": env}
    config = {"handoff": handoff, "slots": 8, "max_context": kind.context, "serve": {**serve, "ready_within_s": 400}}
    if handoff == "nixl":
        config["side_channel_port"] = 5600
    return {"type": "vllm", "config": config}


class Tree:
    """`pdhub up` on a kind. ``log`` has what all its processes wrote."""

    def __init__(self, kind: Kind, directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.kind, self.log = kind, directory / f"{name}.log"
        self._path = directory / f"{name}.yaml"
        self._path.write_text(yaml.safe_dump(document(kind), sort_keys=False))
        self._up: subprocess.Popen[bytes] | None = None
        self.started_s = 0.0

    def __enter__(self) -> Tree:
        begin = time.monotonic()
        with self.log.open("ab") as log:
            argv = [sys.executable, "-m", "pdhub", "up", str(self._path)]
            self._up = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        self.started_s = round(time.monotonic() - begin, 1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._up is not None and self._up.poll() is None:
            self._up.terminate()
            try:
                self._up.wait(40)
            except subprocess.TimeoutExpired:
                self._up.kill()
                self._up.wait(10)

    def wait_ready(self, within_s: float = 300) -> None:
        """Until router and every server answer."""
        ports = [ROUTER, PREFILL] + [{"nodes": NODE, "pull": PULL, "whole": WHOLE}[p] for p in self.kind.pools]

        def up() -> bool:
            assert self._up is not None
            if self._up.poll() is not None:
                raise RuntimeError(f"pdhub up ended\n{self.tail()}")
            return all(get(port, "/health") is not None for port in ports) and get(ROUTER, "/ready") is not None

        wait_for(up, within_s, self.tail)

    def tail(self, lines: int = 60) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill_node(self) -> None:
        """SIGKILL, as the machine's out-of-memory killer would."""
        os.kill(int(_pid_on(NODE)), signal.SIGKILL)


def _pid_on(port: int) -> str:
    import psutil

    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
            return str(connection.pid)
    raise RuntimeError(f"nobody listens on {port}")


def get(port: int, path: str) -> str | None:
    """The body, or None if it does not answer with 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
            return str(reply.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def gauges(port: int) -> dict[str, float]:
    """A vLLM server's requests and use of its cache."""
    text = get(port, "/metrics") or ""
    names = {"running": "num_requests_running", "waiting": "num_requests_waiting", "kv": "kv_cache_usage_perc"}
    found = {}
    for short, name in names.items():
        match = re.search(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        found[short] = float(match[1]) if match else -1.0
    return found


def wait_for(what: Callable[[], bool], within_s: float, why: Callable[[], str]) -> None:
    """Poll until true. Raises TimeoutError with the reason."""
    deadline = time.monotonic() + within_s
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {within_s:g} s: {why()}")
        time.sleep(0.1)
