"""A tree of real processes, and what a trial asks of it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from safety_board import Board, Gate
from safety_config import LANDINGS, NODE, ROUTER, SENDERS, SLOTS, STAGING, configuration, free_ports
from safety_process import Part

from pdhub.node.lifecycle import EXIT_RESTART
from pdhub.testing.faults import Faults

SETTLE_S = 120.0
"""Within which everything must be as before a fault, also where other work takes the processor."""


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
        ports = free_ports(6)
        data = configuration(transport, options or {}, ports, directory)
        self.path.write_text(yaml.safe_dump(data))
        names = (*SENDERS, NODE, ROUTER)
        self.parts = {name: Part(name, port, self.path) for name, port in zip(names, ports, strict=False)}
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
            await asyncio.sleep(0.04)
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
