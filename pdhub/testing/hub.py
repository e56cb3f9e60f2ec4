"""Router, nodes and prefill instances in one process, over real sockets on free loopback ports.

::

    async def test_answer(hub):
        running = await hub.start(toy_topology(fast={"slots": 1}, general={"slots": 4}), plugins=[toy])
        reply = await running.complete("hello", max_tokens=8, tpot_ms=5)
        assert reply.tokens_equal(...)
        assert await running.leaks() == {}

Whatever the test does, the fixture closes everything at its end.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from pdhub import registry as plugins_registry
from pdhub.config.build import Plan, build_plan
from pdhub.config.models import Config
from pdhub.node.decode import NodeServer
from pdhub.node.prefill import PrefillServer
from pdhub.router.server import RouterServer
from pdhub.testing import toy

MODEL = "toy"


def toy_topology(
    *,
    fast: Mapping[str, Any] | None = None,
    general: Mapping[str, Any] | None = None,
    prefill: Mapping[str, Any] | None = None,
    transport: str = "shm",
    fast_nodes: int = 1,
    general_nodes: int = 1,
    prefills: int = 1,
    router: Mapping[str, Any] | None = None,
    handoff: Mapping[str, Any] | None = None,
    admission: Mapping[str, Any] | None = None,
    engine: str = "toy",
) -> dict[str, Any]:
    """A configuration with pools ``fast`` and ``general`` as plain data; ports are 0 (free ones).

    Args:
        fast, general, prefill: options of the engine on each side.
        router, handoff, admission: sections of the configuration.
    """

    def pool(name: str, options: Mapping[str, Any] | None, nodes: int) -> dict[str, Any]:
        return {
            "name": name,
            "engine": {"type": engine, "config": dict(options or {})},
            "nodes": [{"name": f"{name}-{n}", "port": 0} for n in range(nodes)],
        }

    return {
        "model": {"name": MODEL, "aliases": ["toy-alias"]},
        "router": {"port": 0, "debug_headers": True, "probe_interval_s": 0.2, **(router or {})},
        "handoff": {"transport": {"type": transport}, **(handoff or {})},
        "admission": dict(admission or {}),
        "prefill": [
            {"name": f"prefill-{n}", "port": 0, "engine": {"type": engine, "config": dict(prefill or {})}}
            for n in range(prefills)
        ],
        "pools": [pool("fast", fast, fast_nodes), pool("general", general, general_nodes)],
        "policy": {
            "type": "slo_threshold",
            "config": {"tpot_below_ms": 20, "fast": "fast", "otherwise": "general"},
        },
    }


@dataclass
class Reply:
    """One answer of the router.

    ``text`` is the answer's text, ``events`` the parsed SSE events of a stream (``[DONE]`` left out).
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    text: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any] | None:
        """The error of a document or of a stream's last event."""
        if self.events:
            found = [e["error"] for e in self.events if "error" in e]
            return found[-1] if found else None
        return self.json.get("error") if self.status >= 400 else None


class Hub:
    """A running topology."""

    def __init__(self, plan: Plan, nodes: dict[str, NodeServer], prefills: dict[str, PrefillServer]) -> None:
        self.plan = plan
        self.nodes = nodes
        self.prefills = prefills
        self.router = RouterServer(plan)
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))

    @property
    def url(self) -> str:
        return self.router.url

    async def wait_ready(self, timeout_s: float = 20.0) -> None:
        """Until ``/ready`` says so; the last answer is in the error otherwise."""
        deadline, last = time.monotonic() + timeout_s, ""
        while time.monotonic() < deadline:
            async with self.http.get(f"{self.url}/ready") as reply:
                last = await reply.text()
                if reply.status == 200:
                    return
            await asyncio.sleep(0.02)
        raise TimeoutError(f"the router is not ready after {timeout_s} s: {last}")

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        """POST JSON (or raw bytes) and read the whole answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        async with self.http.post(self.url + path, data=data, headers=sent) as reply:
            return _parse(reply.status, dict(reply.headers), await reply.read())

    async def complete(self, prompt: str | Sequence[int], *, tpot_ms: float | None = None, **members: Any) -> Reply:
        """``/v1/completions`` with ``members`` in the body; ``tpot_ms`` becomes the SLO header."""
        body = {"model": MODEL, "prompt": prompt, **members}
        headers = {} if tpot_ms is None else {"x-slo-tpot-ms": str(tpot_ms)}
        return await self.post("/v1/completions", body, headers)

    @asynccontextmanager
    async def stream(
        self, body: Mapping[str, Any], path: str = "/v1/completions", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An open stream; leaving the block disconnects."""
        reply = await self.http.post(self.url + path, json={**body, "stream": True}, headers=dict(headers or {}))
        try:
            yield reply
        finally:
            reply.close()

    async def load(self, node: str) -> dict[str, Any]:
        """``/load`` of a node."""
        async with self.http.get(f"{self.nodes[node].url}/load") as reply:
            return dict(await reply.json())

    async def leaks(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """What is still held after waiting for things to settle; empty = nothing leaks."""
        deadline = time.monotonic() + timeout_s
        while True:
            held = {}
            for name in self.nodes:
                load = await self.load(name)
                if load.get("leases") or load.get("quarantined") or load.get("running"):
                    held[name] = load
            if not held or time.monotonic() > deadline:
                return held
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self.http.close()
        await self.router.close()
        for prefill in self.prefills.values():
            await prefill.close()
        for node in self.nodes.values():
            await node.close()


class HubFactory:
    """What the ``hub`` fixture gives: starts topologies and closes them."""

    def __init__(self) -> None:
        self._hubs: list[Hub] = []
        self._parts: list[NodeServer | PrefillServer] = []
        self._directory = tempfile.TemporaryDirectory(prefix="pdhub-hub-")

    async def start(self, topology: Mapping[str, Any], plugins: Sequence[object] = (toy,), *, wait: bool = True) -> Hub:
        """Start nodes and prefill instances, then the router with their real ports.

        Args:
            topology: the configuration as plain data. plugins: plugin objects beside the installed ones.
            wait: until the router is ready.
        """
        data = json.loads(json.dumps(topology))
        if "tokenizer" not in data["model"] and "path" not in data["model"]:
            data["model"]["tokenizer"] = str(toy.write_tokenizer(Path(self._directory.name) / "tokenizer"))
        loaded = plugins_registry.load(extra=plugins)
        plan = build_plan(Config.model_validate(data), loaded)
        nodes: dict[str, NodeServer] = {}
        prefills: dict[str, PrefillServer] = {}
        for pool, raw in zip(plan.config.pools, data["pools"], strict=True):
            for node, entry in zip(pool.nodes, raw["nodes"], strict=True):
                if plan.pools[pool.name].spec.runtime is None:
                    continue
                server = NodeServer(plan, pool.name, node)
                self._parts.append(server)
                await server.start()
                nodes[node.name] = server
                entry["port"] = _port(server.url)
        for prefill, entry in zip(plan.config.prefill, data["prefill"], strict=True):
            instance = PrefillServer(plan, prefill)
            self._parts.append(instance)
            await instance.start()
            prefills[prefill.name] = instance
            entry["port"] = _port(instance.url)
        hub = Hub(build_plan(Config.model_validate(data), loaded), nodes, prefills)
        self._hubs.append(hub)
        await hub.router.start()
        if wait:
            await hub.wait_ready()
        return hub

    async def close(self) -> None:
        for hub in self._hubs:
            await hub.close()
        for part in self._parts:
            await part.close()
        self._directory.cleanup()


def _port(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def _parse(status: int, headers: dict[str, str], body: bytes) -> Reply:
    reply = Reply(status, {k.lower(): v for k, v in headers.items()}, body)
    if headers.get("Content-Type", headers.get("content-type", "")).startswith("text/event-stream"):
        for line in body.decode().splitlines():
            if line == "data: [DONE]":
                reply.done = True
            elif line.startswith("data: "):
                reply.events.append(json.loads(line[6:]))
        reply.text = "".join(_text(e["choices"][0]) for e in reply.events if e.get("choices"))
    elif status == 200:
        document = json.loads(body)
        if document.get("choices"):
            reply.text = _text(document["choices"][0])
    return reply


def _text(choice: Mapping[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message")
    return str((part.get("content") or "") if part is not None else choice.get("text") or "")
