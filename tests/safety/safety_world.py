"""A tree of real processes that are cheap to kill: they are forked from one that has imported everything."""

from __future__ import annotations

import asyncio
import ctypes
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import aiohttp
import safety_kv as kv
import yaml
from safety_board import Board, Gate

from pdhub.core.handoff import largest_chunk_bytes
from pdhub.node.lifecycle import EXIT_RESTART
from pdhub.testing import toy
from pdhub.testing.faults import Faults

SENDERS = ("sender-0", "sender-1")
NODE, ROUTER = "node", "router"
SLOTS, LANDINGS, STAGING = 2, 6, 8
TIMES = {"claim_ttl_s": 1.0, "deadline_s": 1.0, "ready_ttl_s": 1.0, "fence_within_s": 5.0}
OPTIONS = {name: {"warm_bytes": LANDINGS * kv.LAYOUT.landing_bytes(kv.CAPACITY)} for name in ("shm", "tcp")}
"""Memory of no more than all landings is kept for use again, so that it is used again at once."""

SETTLE_S = 120.0
"""Within which everything must be as before a fault, also where other work takes the processor."""

_MORE_FILES = 40

_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload(
    [
        "pdhub.node.main",
        "pdhub.node.prefill",
        "pdhub.router.main",
        "pdhub.testing.toy",
        "pdhub.testing.faults",
        "tokenizers",
        "uvicorn.lifespan.on",
        "uvicorn.loops.uvloop",
        "uvicorn.protocols.http.httptools_impl",
        *(point.module for point in entry_points(group="pdhub")),
    ]
)


def _serve(verb: str, config: str, name: str, log: str) -> None:
    """In the child: what `pdhub node` and `pdhub router` run."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # go when the process that forks goes
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    if verb == ROUTER:
        from pdhub.router.main import run as run_router

        sys.exit(run_router(config))
    from pdhub.node.main import run as run_node

    sys.exit(run_node(config, name))


class Part:
    """One process of the tree, whichever it is just now."""

    def __init__(self, world: World, name: str, port: int) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self._world = world
        self._files: list[int] = []
        self.process: Any = None
        self.stopped = False

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def start(self) -> None:
        verb = ROUTER if self.name == ROUTER else "node"
        log = self._world.directory / f"{self.name}.log"
        self.process = _fork.Process(
            target=_serve, args=(verb, str(self._world.path), self.name, str(log)), daemon=True
        )  # fmt: skip
        self.process.start()
        self._files.clear()
        self.stopped = False

    def kill(self) -> None:
        """kill -9, and reap it. A stopped one too."""
        self.process.kill()
        self.process.join(10)
        self.stopped = False

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        if self.stopped:
            os.kill(self.pid, signal.SIGCONT)
            self.stopped = False

    def files(self) -> str:
        """Looked at when it is idle: whether it holds many more open files than in the beginning of its life."""
        now = len(os.listdir(f"/proc/{self.pid}/fd"))
        if len(self._files) < 5:
            self._files.append(now)
        much = now > max(self._files) + _MORE_FILES
        return f"{self.name} has {now} open files, once {max(self._files)}" if much else ""


class World:
    """Router, node and two senders.

    Args:
        transport, options: that moves the bytes, under the one that goes wrong. directory: for all files.
    """

    def __init__(self, transport: str, directory: Path, options: dict[str, Any] | None = None) -> None:
        self.transport = transport
        self.directory = directory
        self.board = Board(directory / "board")
        self.path = directory / "config.yaml"
        ports = _ports(6)
        data = _configuration(transport, OPTIONS.get(transport, {}) | (options or {}), ports, directory)
        self.path.write_text(yaml.safe_dump(data))
        names = (*SENDERS, NODE, ROUTER)
        self.parts = {name: Part(self, name, port) for name, port in zip(names, ports, strict=False)}
        self.http: aiohttp.ClientSession | None = None

    @property
    def node(self) -> Part:
        return self.parts[NODE]

    @property
    def router(self) -> Part:
        return self.parts[ROUTER]

    async def open(self) -> World:
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=120)
        )
        self.release_all()
        for part in self.parts.values():
            part.start()
        try:
            await self.until(self.whole, "the tree is ready", 90)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> list[int]:
        """Let everything end by itself; the exit statuses."""
        self.release_all()
        if self.http is not None:
            await self.http.close()
        for part in self.parts.values():
            part.go_on()
            part.process.terminate()
        codes = []
        for part in reversed(self.parts.values()):
            await asyncio.to_thread(part.process.join, 30)
            codes.append(part.process.exitcode)
            part.kill()
        return codes

    def release_all(self) -> None:
        """Hold nothing, spoil nothing."""
        for gate in Gate:
            self.board.open(gate)
        self.board.arrange(Faults(), 0.0)

    async def revive(self) -> None:
        """Start what is dead, let run what is stopped."""
        for part in self.parts.values():
            part.go_on()
            if not part.process.is_alive():
                code = part.process.exitcode
                assert code in (-signal.SIGKILL, EXIT_RESTART), f"{part.name} ended with status {code}\n{self.logs()}"
                part.start()

    async def whole(self) -> bool:
        """Every part answers, and the router misses none of them."""
        await self.revive()
        text = await self._get(f"{self.router.url}/ready")
        return text is not None and not json.loads(text)["problems"]

    async def leases(self) -> dict[str, int]:
        """Of the node, by state; empty if it does not say."""
        text = await self._get(f"{self.node.url}/load", 0.5)
        return dict(json.loads(text)["leases"]) if text is not None else {}

    async def busy_sender(self) -> Part | None:
        """One that has a request, if any."""
        for name in SENDERS:
            part = self.parts[name]
            if not part.stopped and any(await self._gauges(part, "pdhub_prefill_active")):
                return part
        return None

    async def held(self) -> str:
        """What is not idle; empty if everything is given back on every side."""
        text = await self._get(f"{self.node.url}/load")
        if text is None:
            return "the node does not answer"
        load = json.loads(text)
        idle = {"landings_free": LANDINGS, "slots_free": SLOTS, "running": 0, "quarantined": 0}
        if load["leases"] or any(load.get(name, 0) != count for name, count in idle.items()):
            return f"node: {text}"
        for name in SENDERS:
            part = self.parts[name]
            active, free = await self._gauges(part, "pdhub_prefill_active", "pdhub_prefill_staging_slots_free")
            if active or free != STAGING:
                return f"{name}: {active} active, {free} of {STAGING} staging slots free"
        legs = await self._gauges(self.router, "pdhub_router_in_flight")
        return f"router: {legs[0]} legs under way" if legs != [0.0] else ""

    def files(self) -> list[str]:
        """Processes that hold on to more and more files."""
        return [found for part in self.parts.values() if (found := part.files())]

    async def until(self, what: Callable[[], Awaitable[bool]], why: str, within_s: float = SETTLE_S) -> float:
        """Poll until true; seconds that it took. Raises AssertionError."""
        began = time.monotonic()
        while not await what():
            assert time.monotonic() < began + within_s, f"not within {within_s:g} s: {why}\n{self.logs()}"
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    def logs(self) -> str:
        """The end of what each process wrote."""
        paths = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-12:]) for path in paths)

    async def _gauges(self, part: Part, *names: str) -> list[float | None]:
        """Each summed over its labels; None if the part does not tell."""
        text = await self._get(f"{part.url}/metrics")
        if text is None:
            return [None for _ in names]
        found = [re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE) for name in names]
        return [sum(map(float, values)) for values in found]

    async def _get(self, url: str, within_s: float = 5.0) -> str | None:
        assert self.http is not None
        try:
            async with self.http.get(url, timeout=aiohttp.ClientTimeout(total=within_s)) as reply:
                return await reply.text() if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None


def _ports(count: int) -> list[int]:
    socks = [socket.socket() for _ in range(count)]
    for sock in socks:
        sock.bind(("127.0.0.1", 0))
    found = [int(sock.getsockname()[1]) for sock in socks]
    for sock in socks:
        sock.close()
    return found


def _configuration(transport: str, options: dict[str, Any], ports: list[int], directory: Path) -> dict[str, Any]:
    board = str(directory / "board")
    engine = {"type": "safety", "config": {"board": board, "slots": SLOTS}}
    senders = [{"name": name, "port": port, "engine": engine} for name, port in zip(SENDERS, ports, strict=False)]
    return {
        "model": {"name": "safety", "tokenizer": str(toy.write_tokenizer(directory / "tokenizer"))},
        "plugins": {"modules": ["safety_parts"]},
        "router": {
            "port": ports[3],
            "retries": 0,
            "connect_timeout_s": 0.5,
            "first_byte_timeout_s": 3.0,
            "idle_timeout_s": 2.0,
            "probe_interval_s": 0.3,
            "probe_timeout_s": 1.0,
            "breaker_open_s": 0.1,
        },
        "handoff": {
            "transport": {"type": "board", "config": {"board": board, "inner": transport, "options": options}},
            "verify": True,
            "staging_bytes": STAGING * largest_chunk_bytes(kv.LAYOUT, kv.CHUNK),
            **TIMES,
        },
        "prefill": senders,
        "pools": [
            {
                "name": "nodes",
                "engine": engine,
                "landings": LANDINGS,
                "nodes": [{"name": NODE, "port": ports[2], "control_port": ports[4]}],
            }
        ],
        "policy": {"type": "round_robin"},
    }
