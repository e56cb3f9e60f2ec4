"""Processes of a TileRT topology on one machine, and routers in front of them."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from pdhub import registry
from pdhub.config.build import build_plan
from pdhub.config.models import Config
from pdhub.router.server import RouterServer
from pdhub.testing import toy

HERE = Path(__file__).parent
LONGEST = 256
"""Tokens of a node's cache."""


def site():
    """Directory with TileRT and NIXL, made by tools/make_site.py; None = not there."""
    found = os.environ.get("PDHUB_TILERT_SITE")
    return Path(found).resolve() if found else None


def free_ports(count):
    """Consecutive ones: a node's control port is the one below its HTTP port."""
    for _ in range(50):
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for n in range(1, count):
                    stack.enter_context(socket.create_server(("127.0.0.1", first + n)))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


def environment(**more):
    """Of a child that has TileRT and NIXL, on this machine alone."""
    return {
        **os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{site()}", "PYTHONUNBUFFERED": "1",
        "NIXL_PTHR_DELAY_US": "1000", "UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "lo", "OMP_NUM_THREADS": "1",
        "TILERT_PD_PROBE_ADDR": "127.0.0.1", "TILERT_PD_SHARDS": "1", "TILERT_PD_SENDERS": "1", **more,
    }  # fmt: skip


class Process:
    """One child, with its output in a file."""

    def __init__(self, log, words, **env):
        self.log, self._words = log, words
        self._env = environment(**env)
        self.start()

    def start(self):
        with self.log.open("ab") as out:
            self._child = subprocess.Popen(
                [sys.executable, *self._words], env=self._env, stdout=out, stderr=subprocess.STDOUT
            )

    def kill(self):
        self._child.kill()
        self._child.wait()

    def stop(self):
        """Wait, but not for ever, for an end in order."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(5)
                return
            self.kill()

    def wait(self, url, within_s=90):
        end = time.monotonic() + within_s
        while True:
            assert self._child.poll() is None, self.log.read_text()[-3000:]
            try:
                with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 1):
                    return
            except OSError:
                assert time.monotonic() < end, self.log.read_text()[-3000:]
                time.sleep(0.05)


class Node(Process):
    """TileRT's decode server. ``engine``: see tilert_server.py."""

    def __init__(self, directory, engine, pace_s=0.0):
        self.ctrl = free_ports(2)
        self.port = self.ctrl + 1
        words = [str(HERE / "tilert_server.py"), "--engine", engine, "--model", "dsv32", "--max-seq-len", str(LONGEST)]
        words += ["--transport", "nixl", "--ctrl-port", str(self.ctrl), "--http-port", str(self.port)]
        env = {"KV_ENGINE_PACE_S": str(pace_s), "TILERT_DECODE_POLL_MS": "5"}
        super().__init__(directory / f"node-{engine}-{self.port}.log", words, **env)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


class Prefill(Process):
    """A made-up prefill instance: tilert_producer.py."""

    def __init__(self, directory):
        self.port = free_ports(1)
        words = [str(HERE / "tilert_producer.py"), str(self.port), str(LONGEST)]
        super().__init__(directory / f"prefill-{self.port}.log", words)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


class World:
    """A router, and ways to look at what is behind it."""

    def __init__(self, server, http, nodes, prefill):
        self.server, self.http, self.nodes, self.prefill = server, http, nodes, prefill

    async def ask(self, path="/v1/completions", headers=None, **members):
        body = {"model": "m", **members}
        async with self.http.post(self.server.url + path, json=body, headers=headers or {}) as reply:
            raw = await reply.read()
            return reply.status, raw, reply.headers

    async def script(self, **how):
        async with self.http.post(self.prefill.url + "/script", json=how) as reply:
            assert reply.status == 200

    async def seen(self):
        async with self.http.get(self.prefill.url + "/seen") as reply:
            return await reply.json()

    async def status(self, node=0):
        async with self.http.get(self.nodes[node].url + "/decode_status") as reply:
            return await reply.json()

    async def idle(self, within_s=20):
        """Nothing under way at the router, and every node is free."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            busy = [e.name for e in self.server.context.fleet.endpoints() if e.in_flight]
            states = [(await self.status(n))["status"] for n in range(len(self.nodes))]
            if not busy and set(states) == {"idle"}:
                return
            await asyncio.sleep(0.05)
        raise AssertionError((busy, states))

    def breakers(self):
        return {e.name: e.health(time.monotonic()).value for e in self.server.context.fleet.endpoints()}

    async def record(self):
        """Of the request that ended last; a moment after its answer it is there."""
        while not self.server.context.records:
            await asyncio.sleep(0.01)
        return self.server.context.records[-1]


@asynccontextmanager
async def router(tmp_path, nodes, prefill, *, options=None, fallback=None, **sections):
    """Args:
    options: of the TileRT pool. fallback: port of an OpenAI server, as a second pool.
    """
    config = {"profile": "dsv32", "max_seq_len": LONGEST, "mtp": False, "settle_s": 0.5, **(options or {})}
    pools = [
        {
            "name": "tilert",
            "engine": {"type": "tilert", "config": config},
            "nodes": [{"name": f"t{i}", "port": n.port, "launch": False} for i, n in enumerate(nodes)],
        }
    ]
    if fallback:
        node = {"name": "native-0", "port": fallback, "launch": False}
        pools.append({"name": "native", "engine": {"type": "openai"}, "nodes": [node]})
    (tmp_path / "model").mkdir(exist_ok=True)
    toy.write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [256], "top_p": 0.9}))
    data = {
        "model": {"name": "m", "tokenizer": str(tmp_path / "model")},
        "router": {
            "port": 0,
            "debug_headers": True,
            "probe_interval_s": 0.2,
            "pair_check": False,
            **sections.pop("router", {}),
        },
        "admission": {"default_budget_s": 110},  # a hundred requests in one line, on a slow machine
        "handoff": {"deadline_s": 20, **sections.pop("handoff", {})},
        "prefill": [
            {
                "name": "p0",
                "port": prefill.port,
                "launch": False,
                "engine": {"type": "vllm", "config": {"handoff": "none"}},
            }
        ],
        "pools": pools,
        "policy": {"type": "slo_threshold", "config": {"tpot_below_ms": 1e6, "fast": "tilert", "otherwise": "tilert"}},
        **sections,
    }
    server = RouterServer(build_plan(Config.model_validate(data), registry.load(extra=[toy])))
    await server.start()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=115)) as http:
        try:
            world = World(server, http, nodes, prefill)
            await _ready(world)
            yield world
        finally:
            await server.close()


async def _ready(world):
    for _ in range(300):
        async with world.http.get(world.server.url + "/ready") as reply:
            state = await reply.json()
            if reply.status == 200 and not state["problems"]:
                return
        await asyncio.sleep(0.05)
    raise AssertionError(state)
