"""Processes of a topology with a hosted TileRT node, and routers in front of them."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import aiohttp
import tilert_prefill_planes
import yaml
from tilert_world import HERE, LONGEST, Process, free_ports

from pdhub import registry
from pdhub.config.build import build_plan
from pdhub.config.models import Config
from pdhub.router.server import RouterServer
from pdhub.testing import toy

MODEL = {"model_type": "made_up", "hidden_size": 61}


def write_model(directory):
    directory.mkdir()
    toy.write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(MODEL))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [256], "top_p": 0.9}))
    return directory


class Hosted:
    """A node with TileRT's engine, and a prefill. ``engine``: ``stub``, started by ``pdhub tilert serve``; or ``kv``,
    which answers from its KV at a pace, by ``pdhub node``."""

    def __init__(self, directory, engine, *, pace_s=0.0, transport="shm"):
        directory.mkdir()
        self.model, self.transport = write_model(directory / "model"), transport
        self.port, self.prefill_port = free_ports(1), free_ports(1)
        words = ["-m", "pdhub", "tilert", "serve"] if engine == "stub" else [str(HERE / "tilert_hosted.py"), "node"]
        config = self._written(directory / "node.yaml", {"type": "vllm", "config": {"handoff": "pdhub"}})
        self.node = Process(directory / "node.log", [*words, str(config), "t0"], KV_ENGINE_PACE_S=str(pace_s))
        config = self._written(directory / "prefill.yaml", {"type": "planes"})
        words = [str(HERE / "tilert_prefill_planes.py"), str(config)]
        self.prefill = Process(directory / "prefill.log", words)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def config(self, prefill, **sections):
        options = {"profile": "dsv32", "max_seq_len": LONGEST, "engine": "stub"}
        return {
            "model": {"name": "m", "path": str(self.model)},
            "handoff": {"transport": {"type": self.transport}, "verify": True, "staging_bytes": 16 << 20},
            "prefill": [{"name": "p0", "port": self.prefill_port, "launch": False, "engine": prefill}],
            "pools": [
                {
                    "name": "tilert",
                    "engine": {"type": "tilert-node", "config": options},
                    "nodes": [{"name": "t0", "port": self.port, "launch": False}],
                }
            ],
            "policy": {"type": "slo"},
            **sections,
        }

    def _written(self, path, prefill):
        path.write_text(yaml.safe_dump(self.config(prefill)))
        return path

    def wait(self):
        self.node.wait(self.url)
        self.prefill.wait(f"http://127.0.0.1:{self.prefill_port}")

    def stop(self):
        self.node.stop()
        self.prefill.stop()


class HostedWorld:
    """A router, and what the node behind it says of itself."""

    def __init__(self, server, http, hosted):
        self.server, self.http, self.hosted = server, http, hosted

    async def ask(self, path="/v1/completions", **members):
        async with self.http.post(self.server.url + path, json={"model": "m", **members}) as reply:
            return reply.status, await reply.read(), reply.headers

    async def load(self):
        async with self.http.get(self.hosted.url + "/load") as reply:
            return await reply.json()

    async def until(self, there, what, within_s=60):
        """Until the node's load is as it should be."""
        end = time.monotonic() + within_s
        while not there(load := await self.load()):
            assert time.monotonic() < end, (what, load)
            await asyncio.sleep(0.02)
        return load

    async def free(self):
        """Nothing is held at the node, and nothing under way at the router."""
        whole = lambda load: (load["leases"], load["landings_free"], load["slots_free"]) == ({}, 2, 1)  # noqa: E731
        await self.until(whole, "everything was given back")
        end = time.monotonic() + 60
        while any(e.in_flight for e in self.server.context.fleet.endpoints()):
            assert time.monotonic() < end, "the router counts requests that are over"
            await asyncio.sleep(0.02)


@asynccontextmanager
async def router(hosted):
    sections = {
        "router": {"port": 0, "debug_headers": True, "probe_interval_s": 0.2, "pair_check": False},
        "admission": {"default_budget_s": 110},
    }
    config = Config.model_validate(hosted.config({"type": "planes"}, **sections))
    server = RouterServer(build_plan(config, registry.load(extra=[tilert_prefill_planes])))
    await server.start()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=115)) as http:
        try:
            world = HostedWorld(server, http, hosted)
            await _ready(world)
            yield world
        finally:
            await server.close()


async def _ready(world, within_s=60):
    end = time.monotonic() + within_s
    while True:
        async with world.http.get(world.server.url + "/ready") as reply:
            state = await reply.json()
            if reply.status == 200 and not state["problems"]:
                return
        assert time.monotonic() < end, state
        await asyncio.sleep(0.05)
