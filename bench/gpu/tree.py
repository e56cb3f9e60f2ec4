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

ROUTER, PREFILL, PREFILL_PUSH, NODE, PULL, WHOLE, PUSH = 8000, 8100, 8150, 8200, 8300, 8400, 8500
SIDE_PULL, SIDE_PUSH = 5600, 5700
"""Side channels of NIXL: the prefill instance's; decode's follows it."""
PUSH_ID = "prefill-push"
"""`engine_id` of the instance that pushes: known beforehand, so that both legs can start at once."""

GRAPHS = ("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}')
"""Decode runs in CUDA graphs; nothing is compiled, which would take minutes."""

CHOOSE = "x-pool"
"""Header that names the pool."""


@dataclass(frozen=True)
class Kind:
    """One tree.

    Args:
        model: directory. dtype: of weights and KV. random: weights are random.
        pools: of ``nodes`` (pdhub's hand-over), ``pull`` (vLLM's NixlConnector), ``push`` (its NixlPushConnector, with
            a prefill instance of its own: the two cannot share one), ``whole`` (no hand-over).
        transport: of the nodes, as in YAML. verify: digests.
        context: prompt plus output. step: tokens that prefill computes at once.
        prefill_kv, decode_kv: bytes of the servers' caches, as vLLM reads them.
        gpus: prefill's, and that of everything else.
        landings: of the node. args: further arguments of vLLM servers.
        prefill_args, prefill_gpus, prefill_env: of the first prefill instance; several GPUs: tensor parallelism.
        eager: prefill instances run without CUDA graphs.
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
    prefill_args: Sequence[str] = ()
    prefill_env: dict[str, str] = field(default_factory=dict)
    prefill_gpus: Sequence[int] = ()
    eager: bool = True


def document(kind: Kind) -> dict[str, Any]:
    """What a user would write."""
    first, second = kind.gpus
    graphs = ("--enforce-eager",) if kind.eager else GRAPHS
    handoff = "nixl" if "pull" in kind.pools else "pdhub"
    prefill = _vllm(kind, kind.prefill_gpus or (first,), kind.prefill_kv, handoff, graphs)
    prefill["config"]["pdhub_port"] = 5580
    prefill["config"]["serve"]["args"] += kind.prefill_args
    prefill["config"]["serve"]["env"] |= kind.prefill_env
    instances = [_instance("prefill-0", PREFILL, prefill, [p for p in kind.pools if p in ("nodes", "pull")])]
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
    if "push" in kind.pools:
        instances.append(
            _instance(PUSH_ID, PREFILL_PUSH, _vllm(kind, (first,), kind.prefill_kv, "nixl_push", graphs), ["push"])
        )
    for name, handoff, port in (("pull", "nixl", PULL), ("push", "nixl_push", PUSH), ("whole", "none", WHOLE)):
        if name in kind.pools:
            engine = _vllm(kind, (second,), kind.decode_kv, handoff)
            pools.append({"name": name, "engine": engine, "nodes": [{"name": f"{name}-0", "port": port}]})
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
        "prefill": instances,
        "pools": pools,
        "policy": {"type": "round_robin", "rules": rules},
    }


def _instance(name: str, port: int, engine: dict[str, Any], pools: Sequence[str]) -> dict[str, Any]:
    return {"name": name, "port": port, "engine": engine, "pools": list(pools)}


def _vllm(kind: Kind, gpus: Sequence[int], kv: str, handoff: str, graphs: Sequence[str] = GRAPHS) -> dict[str, Any]:
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
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRITON_F32_DEFAULT": "ieee",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled at the first start, for a minute and a half
    }
    serve = {"command": [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"], "args": args, "env": env}
    config = {"handoff": handoff, "slots": 8, "max_context": kind.context, "serve": {**serve, "ready_within_s": 400}}
    if len(gpus) > 1:
        config["tensor_parallel"] = len(gpus)
    if handoff.startswith("nixl"):
        config["side_channel_port"] = SIDE_PULL if handoff == "nixl" else SIDE_PUSH
    if handoff == "nixl_push":
        config["engine_id"] = PUSH_ID
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
        own = {"nodes": [NODE], "pull": [PULL], "push": [PREFILL_PUSH, PUSH], "whole": [WHOLE]}
        ports = [ROUTER, PREFILL, *(port for pool in self.kind.pools for port in own[pool])]

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


def preemptions() -> int:
    """How often the prefill instance took blocks back from a request so far."""
    match = re.search(r"^vllm:num_preemptions_total(?:\{.*\})? (\S+)$", get(PREFILL, "/metrics") or "", re.MULTILINE)
    return int(float(match[1])) if match else -1


def wait_for(what: Callable[[], bool], within_s: float, why: Callable[[], str]) -> None:
    """Poll until true. Raises TimeoutError with the reason."""
    deadline = time.monotonic() + within_s
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {within_s:g} s: {why()}")
        time.sleep(0.1)
