"""Scripted servers in place of engines, nodes and prefill instances, and a router in front of them."""

import asyncio
import io
import json
from contextlib import asynccontextmanager
from itertools import pairwise

import aiohttp
from aiohttp import web

from pdhub import registry
from pdhub.config.build import build_plan
from pdhub.config.models import Config
from pdhub.router.server import RouterServer
from pdhub.testing import toy

TEXT = {"model": "m", "prompt": "hello", "max_tokens": 4}


def sse(*events, done=True):
    parts = [b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events]
    return b"".join(parts) + (b"data: [DONE]\n\n" if done else b"")


def text_event(text, finish=None):
    return {"id": "x", "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}


class Server:
    """An aiohttp application on a free port."""

    def __init__(self):
        self.app = web.Application(client_max_size=1 << 26)
        self.seen = []
        self.left = 0
        self._runner = None
        self.port = 0

    async def start(self, port=0):
        self._runner = web.AppRunner(self.app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def close(self):
        if self._runner is not None:
            runner, self._runner = self._runner, None
            runner._shutdown_timeout = 0.1
            await runner.cleanup()

    async def note(self, request):
        body = await request.read()
        self.seen.append((request.path, {k.lower(): v for k, v in request.headers.items()}, body))
        return body


class Engine(Server):
    """An OpenAI-compatible server; ``answer(request)`` is the script of its completions."""

    def __init__(self, answer, cards=({"id": "m", "max_model_len": 1000},)):
        super().__init__()
        self.answer = answer
        self.cards = list(cards)
        self.app.router.add_get("/{prefix:.*}v1/models", self._models)
        self.app.router.add_post("/{path:.*}", self._complete)

    async def _models(self, request):
        return web.json_response({"object": "list", "data": self.cards})

    async def _complete(self, request):
        await self.note(request)
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.left += 1
            raise


def answer_bytes(raw, *, status=200, content_type="text/event-stream", cuts=(), pause=0.0, headers=None, cut_off=False):
    """A script: send ``raw`` in pieces that end at ``cuts``; ``cut_off`` breaks the connection afterwards."""

    async def answer(request):
        reply = web.StreamResponse(status=status, headers={"content-type": content_type, **(headers or {})})
        await reply.prepare(request)
        edges = [0, *cuts, len(raw)]
        for a, b in pairwise(edges):
            await reply.write(raw[a:b])
            await asyncio.sleep(pause)
        if cut_off:
            request.transport.abort()
        else:
            await reply.write_eof()
        return reply

    return answer


def answer_json(document, status=200, headers=None):
    async def answer(request):
        return web.json_response(document, status=status, headers=headers)

    return answer


async def answer_never(request):
    await asyncio.sleep(3600)


class Node(Server):
    """A node of ``pdhub node`` without an engine. ``scripts`` replaces the answer of a path."""

    def __init__(self, *, landings=2, fingerprint="f", scripts=None):
        super().__init__()
        self.landings = landings
        self.fingerprint = fingerprint
        self.scripts = scripts or {}
        self.claims, self.cancels, self.decodes = [], [], []
        for path in ("/claim", "/decode", "/cancel"):
            self.app.router.add_post(path, self._post)
        for path in ("/health", "/capabilities", "/load"):
            self.app.router.add_get(path, self._get)

    def info(self):
        features = ["sampling", "seed", "logprobs", "ignore_eos", "min_tokens", "stop_token_ids"]
        return {
            "node": "n", "version": "0", "protocol": 1, "engine": "fake", "model": "m", "transport": "shm",
            "capabilities": {"features": features, "max_context": 500, "max_logprobs": 5, "slots": 1},
            "accepts": [self.fingerprint], "landings": self.landings, "control": ["127.0.0.1", 1],
        }  # fmt: skip

    async def _get(self, request):
        if script := self.scripts.get(request.path):
            return await script(request)
        load = {"landings_free": 1, "slots_free": 1, "leases": {}}
        documents = {"/health": {"status": "ok"}, "/capabilities": self.info(), "/load": load}
        return web.json_response(documents[request.path])

    async def _post(self, request):
        body = json.loads(await self.note(request))
        kept = {"/claim": self.claims, "/decode": self.decodes, "/cancel": self.cancels}[request.path]
        kept.append(body)
        script = self.scripts.get(request.path)
        try:
            if script is not None:
                return await script(request)
        except asyncio.CancelledError:
            self.left += 1
            raise
        if request.path == "/claim":
            return web.json_response(
                {
                    "transfer_id": body["transfer_id"], "generation": len(self.claims), "host": "127.0.0.1", "port": 1,
                    "capacity_tokens": body["tokens"], "fingerprint": body["fingerprint"],
                }
            )  # fmt: skip
        if request.path == "/cancel":
            return web.json_response({})
        return web.Response(body=frames(b"abc"), content_type="application/x-ndjson")

    @property
    def cancelled(self):
        return [c["transfer_id"] for c in self.cancels]


def frames(text, *, end=True, error=None):
    lines = [{"s": {"handoff_ms": 1.5, "wait_ms": 0.0, "kv_bytes": 64}}, *({"t": [b]} for b in text)]
    if error is not None:
        lines.append({"error": error})
    elif end:
        lines.append({"done": {"reason": "length", "n": len(text)}})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Prefill(Server):
    """An embedded prefill instance without an engine."""

    def __init__(self, *, fingerprint="f", script=None):
        super().__init__()
        self.fingerprint = fingerprint
        self.script = script
        self.stopped = False
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/prefill", self._info)
        self.app.router.add_post("/v1/completions", self._complete)
        self.app.router.add_post("/v1/chat/completions", self._complete)

    async def _health(self, request):
        if self.stopped:
            await answer_never(request)
        return web.json_response({"status": "ok"})

    async def _info(self, request):
        return web.json_response(
            {
                "node": "p", "version": "0", "protocol": 1, "engine": "fake", "model": "m", "transport": "shm",
                "fingerprint": self.fingerprint, "max_model_len": 500, "capabilities": Node().info()["capabilities"],
                "sampling_defaults": {"temperature": 0.0}, "eos_token_ids": [256],
            }
        )  # fmt: skip

    async def _complete(self, request):
        await self.note(request)
        try:
            if self.script is not None:
                return await self.script(request)
        except asyncio.CancelledError:
            self.left += 1
            raise
        return web.json_response(
            {
                "choices": [{"token_ids": [97], "text": "a", "prompt_token_ids": [1, 2, 3]}],
                "prompt_token_ids": [1, 2, 3],
                "usage": {"prompt_tokens": 3},
            }
        )


class Running:
    """A router with a client."""

    def __init__(self, router, http):
        self.router = router
        self.http = http
        self.url = router.url

    async def post(self, body, path="/v1/completions", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=io.BytesIO(data), headers=headers) as reply:
            return reply.status, await reply.read(), reply.headers

    async def record(self):
        async with self.http.get(self.url + "/debug/requests") as reply:
            return (await reply.json())["requests"][0]

    async def metric(self, name):
        async with self.http.get(self.url + "/metrics") as reply:
            text = await reply.text()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    async def idle(self):
        """Nothing is in flight, nothing waits."""
        for _ in range(100):
            fleet = self.router.context.fleet
            busy = [e.name for e in fleet.endpoints() if e.in_flight]
            if not busy and not any(self.router.context.gate.waiting().values()):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"in flight: {busy}")


@asynccontextmanager
async def router_before(pools, prefills=(), *, tmp_path=None, ready=True, router=None, **sections):
    """Start servers and a router in front of them.

    Args:
        pools: name → servers. Engines make an ``openai`` pool (with ``options``), nodes a hosted one.
    """
    options = sections.pop("options", {})
    engine = sections.pop("engine", "openai")
    plugins = sections.pop("plugins", ())
    node = {"launch": False, **sections.pop("node", {})}
    servers = [s for pool in pools.values() for s in pool] + list(prefills)
    for server in servers:
        if not server.port:
            await server.start()
    names = list(pools)
    data = {
        "model": {"name": "m", "aliases": ["alias"]},
        "router": {"port": 0, "debug_headers": True, "probe_interval_s": 0.2, **(router or {})},
        "pools": [
            {
                "name": name,
                "engine": {"type": engine, "config": options} if isinstance(pool[0], Engine) else {"type": "toy"},
                "nodes": [{"name": f"{name}-{n}", "port": s.port, **node} for n, s in enumerate(pool)],
            }
            for name, pool in pools.items()
        ],
        "prefill": [
            {"name": f"prefill-{n}", "port": s.port, "launch": False, "engine": {"type": "toy"}}
            for n, s in enumerate(prefills)
        ],
        "policy": {
            "type": "slo_threshold",
            "config": {"tpot_below_ms": 20, "fast": names[0], "otherwise": names[-1]},
        },
        **sections,
    }
    if tmp_path is not None:
        data["model"]["tokenizer"] = str(toy.write_tokenizer(tmp_path / "tokenizer"))
    server = RouterServer(build_plan(Config.model_validate(data), registry.load(extra=[toy, *plugins])))
    await server.start()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
        running = Running(server, http)
        try:
            for _ in range(300 if ready else 0):
                async with http.get(server.url + "/ready") as reply:
                    state = await reply.json()
                    if reply.status == 200 and not state["problems"]:
                        break
                await asyncio.sleep(0.02)
            yield running
        finally:
            await server.close()
            for each in servers:
                await each.close()
