"""Scripted stand-ins for stock vLLM servers. They speak vLLM's JSON and keep its rules of hand-over; they run no vLLM.

The "KV" of a prompt is the prompt's ids, kept under the prefill engine's id and internal request id, and an answer is a
hash chain over it. So an answer that equals :func:`answer_of` proves that the right KV came to the right request.
What would kill or hang a real engine is noted in ``deaths``.
"""

import asyncio
import hashlib
import json
import secrets
import time
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from router_fakes import Running, Server

from pdhub import registry
from pdhub.config.build import build_plan
from pdhub.config.models import Config
from pdhub.router.server import RouterServer

BLOCK = 4
EOS = 256


def ids_of(body, chat):
    if not chat:
        prompt = body["prompt"]
        return list(prompt.encode()) if isinstance(prompt, str) else prompt if isinstance(prompt[0], int) else [1]
    text = json.dumps(body.get("tools") or "") + "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
    return list(text.encode())


def tokens_of(prompt, count):
    chain, out = hashlib.blake2b(bytes(prompt), digest_size=8).digest(), []
    for _ in range(count):
        chain = hashlib.blake2b(chain, digest_size=8).digest()
        out.append(97 + chain[0] % 26)
    return out


def answer_of(prompt, count):
    """What any right server says."""
    return bytes(tokens_of(prompt, count)).decode()


class Fabric:
    """What moves between the engines: finished prefills, and writes under way."""

    def __init__(self):
        self.held = {}  # (engine id, internal request id or transfer id) -> prompt ids
        self.changed = asyncio.Condition()

    async def put(self, key, prompt):
        async with self.changed:
            self.held[key] = prompt
            self.changed.notify_all()

    async def take(self, find):
        async with self.changed:
            await self.changed.wait_for(lambda: find() is not None)
            return self.held.pop(find())


class VLLM(Server):
    """One server.

    Args:
        connector: ``nixl``, ``nixl_push``, ``mooncake`` or None.
        details: as with ``--enable-prompt-tokens-details``. auto_tools: as with ``--enable-auto-tool-choice``.
    """

    def __init__(self, fabric, connector=None, *, ranks=1, details=True, auto_tools=False, engine_id=None):
        super().__init__()
        self.fabric, self.connector, self.ranks = fabric, connector, ranks
        self.details, self.auto_tools = details, auto_tools
        self.bases = [engine_id or secrets.token_hex(8)]
        self.deaths, self.bodies, self.headers = [], [], []
        self.script = None  # an answer in place of the usual one
        self.stranger = None  # the 404 of another server, in place of the model cards
        self.writes = True  # False: the connector moves nothing
        self.computing = asyncio.Event()
        self.computing.set()  # cleared: prefills wait
        self.cached = 0
        self.first_is_eos = False
        self.metrics = (
            "# HELP vllm:num_requests_running Number\n"
            'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
            'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
        )
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_get("/query", self._query)
        self.app.router.add_post("/v1/completions", self._serve)
        self.app.router.add_post("/v1/chat/completions", self._serve)

    def restart(self):
        """Another process: another engine id."""
        self.bases.append(secrets.token_hex(8))

    def engine_id(self, rank=0):
        return f"{self.bases[-1]}_dp{rank}" if self.ranks > 1 else self.bases[-1]

    async def _models(self, request):
        if self.stranger is not None:
            return web.Response(status=404, body=self.stranger)
        card = {"id": "m", "object": "model", "max_model_len": 400, "owned_by": "vllm"}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, request):
        return web.Response(text=self.metrics, content_type="text/plain")

    async def _query(self, request):
        known = {str(r): {"engine_id": self.engine_id(r), "worker_addr": {}} for r in range(self.ranks)}
        return web.json_response(known)

    async def _serve(self, request):
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        try:
            if self.script is not None:
                return await self.script(request)
            return await self._answer(request, body, request.path.endswith("chat/completions"))
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def _answer(self, request, body, chat):
        if wrong := self._wrong(body, chat):
            error = {"message": wrong, "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response({"error": error}, status=400)
        params = dict(body.get("kv_transfer_params") or {})
        name = ("chatcmpl-" if chat else "cmpl-") + request.headers["x-request-id"]
        internal = f"{name}{'' if chat else '-0'}-{secrets.token_hex(4)}"
        prompt, shown = ids_of(body, chat), None
        if (given := params.pop("prompt_token_ids", None)) is not None:
            prompt = given
        if params.get("do_remote_prefill"):
            try:
                prompt = await self._receive(params, internal, prompt, body)
            except ConnectionError:
                error = {"message": "Internal server error", "type": "InternalServerError", "code": 500}
                return web.json_response({"error": error}, status=500)
        else:
            await self.computing.wait()
        reason = "length"
        if params.get("do_remote_decode"):
            if self.first_is_eos and not body.get("ignore_eos"):
                reason = "stop"
            rank = int(request.headers.get("x-data-parallel-rank", 0))
            shown = await self._hand_over(params, internal, prompt, rank, reason)
        return await self._say(request, body, chat, name, prompt, shown, reason, remote=params.get("do_remote_prefill"))

    def _wrong(self, body, chat):
        if body.get("stream_options") and not body.get("stream"):
            return "Stream options can only be defined when `stream=True`."
        if body.get("stream") and body.get("prompt_logprobs"):
            return "`prompt_logprobs` are not available when `stream=True`."
        if (body.get("min_tokens") or 0) > (body.get("max_tokens") or 99):
            return "min_tokens must be less than or equal to max_tokens"
        if body.get("tool_choice") == "auto" and not self.auto_tools:
            return '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        return None

    async def _hand_over(self, params, internal, prompt, rank, reason):
        if self.connector == "mooncake":
            if "transfer_id" in params and reason == "length" and self.writes:
                await self.fabric.put((self.engine_id(rank), params["transfer_id"]), prompt)
            return None
        if self.connector is None:
            return None
        if self.writes:
            await self.fabric.put((self.engine_id(rank), internal), prompt)
        return {
            "do_remote_prefill": True, "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 2 + len(prompt) // BLOCK))], "remote_engine_id": self.engine_id(rank),
            "remote_request_id": internal, "remote_host": "127.0.0.1", "remote_port": 5600 + rank, "tp_size": 1,
            "dcp_size": 1, "pp_size": 1, "remote_num_tokens": len(prompt),
            "transfer_mode": "push" if self.connector == "nixl_push" else "pull",
        }  # fmt: skip

    async def _receive(self, params, internal, prompt, body):
        """KV of the prompt. ConnectionError: the load failed, and the request with it."""
        if (body.get("n") or 1) > 1 or body.get("prompt_logprobs") is not None:
            self.deaths.append("several sequences, or prompt log probabilities, over remote KV")
        if self.connector == "mooncake":
            if not {"transfer_id", "remote_engine_id", "remote_bootstrap_addr"} <= params.keys():
                self.deaths.append("a parked request: keys missing")
            key = (params["remote_engine_id"], params["transfer_id"])
            return await self.fabric.take(lambda: key if key in self.fabric.held else None)
        needed = {"remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_request_id"}
        if not needed <= params.keys():
            self.deaths.append(f"KeyError in the scheduler: {needed - params.keys()}")
        if self.connector == "nixl":
            if not params.get("remote_block_ids"):
                self.deaths.append("assert num_external_tokens == 0")
            key = (params["remote_engine_id"], params["remote_request_id"])
            if key not in self.fabric.held:
                raise ConnectionError
            stored = self.fabric.held.pop(key)
            if 1 + len(prompt) // BLOCK > len(params["remote_block_ids"][0]):
                self.deaths.append("fewer remote blocks than needed")
            return stored
        if params["remote_engine_id"] not in self.peers():
            raise ConnectionError  # the handshake finds another engine at that address
        wanted = internal.rsplit("-", 1)[0]

        def find():
            pairs = [k for k in self.fabric.held if k[0] == params["remote_engine_id"]]
            return next((k for k in pairs if k[1].rsplit("-", 1)[0] == wanted), None)

        return await self.fabric.take(find)

    def peers(self):
        """Engine ids that answer at the prefill instance's side channel; set by the world."""
        return self._peers()

    async def _say(self, request, body, chat, name, prompt, params, reason, remote):
        count = body.get("max_completion_tokens") or body.get("max_tokens") or 8
        tokens = tokens_of(prompt, count)
        usage = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + count, "completion_tokens": count}
        usage["prompt_tokens_details"] = (
            {"cached_tokens": len(prompt) if remote else self.cached} if self.details else None
        )
        kind = "chat.completion" if chat else "text_completion"
        head = {"id": name, "object": kind, "created": int(time.time()), "model": body["model"]}
        if not body.get("stream"):
            choice = {"index": 0, "logprobs": None, "finish_reason": reason, "stop_reason": None}
            text = bytes(tokens).decode()
            choice |= {"message": {"role": "assistant", "content": text, "tool_calls": []}} if chat else {"text": text}
            asked = [None, {"98": {"logprob": -0.5, "rank": 1}}] if body.get("prompt_logprobs") is not None else None
            ids = body.get("return_token_ids")
            choice["token_ids"] = tokens if ids else None
            top = {"prompt_logprobs": asked, "prompt_token_ids": prompt if ids else None} if chat else {}
            choice |= {} if chat else {"prompt_logprobs": asked, "prompt_token_ids": prompt if ids else None}
            return web.json_response({**head, "choices": [choice], "usage": usage, **top, "kv_transfer_params": params})
        reply = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)
        await reply.write(b": ping\n\n")
        if chat:
            head["object"] = "chat.completion.chunk"
        for i, token in enumerate(tokens):
            last = i == len(tokens) - 1
            part = {"delta": {"content": chr(token)}} if chat else {"text": chr(token)}
            choice = {"index": 0, **part, "logprobs": None, "finish_reason": reason if last else None}
            await reply.write(_event({**head, "choices": [choice]}))
        if (body.get("stream_options") or {}).get("include_usage"):
            await reply.write(_event({**head, "choices": [], "usage": usage}))
        await reply.write(b"data: [DONE]\n\n")
        return reply


def _event(document):
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


class World:
    """A running topology: prefill instance and decode node of one hand-over, an aggregated server, a router."""

    def __init__(self, prefill, decode, single, running):
        self.prefill, self.decode, self.single, self.running = prefill, decode, single, running

    async def ask(self, path="/v1/completions", **members):
        return await self.running.post({"model": "m", **members}, path)

    @property
    def deaths(self):
        return self.prefill.deaths + self.decode.deaths


@asynccontextmanager
async def world(
    handoff,
    /,
    *,
    options=None,
    ranks=1,
    engine_id=None,
    router=None,
    single=False,
    decodes=1,
    ready=True,
    **sections,
):
    """Args:
    options: of the prefill instance's engine. single: an aggregated pool too, second in order.
    ready: wait until all is ready.
    """
    fabric = Fabric()
    prefill = VLLM(fabric, handoff, ranks=ranks, engine_id=engine_id)
    nodes = [VLLM(fabric, handoff) for _ in range(decodes)]
    alone = VLLM(fabric)
    for server in (prefill, *nodes, alone):
        server._peers = lambda: [prefill.engine_id(r) for r in range(ranks)]
        await server.start()
    config = {
        "handoff": handoff,
        **({"bootstrap_port": prefill.port} if handoff == "mooncake" else {}),
        **(options or {}),
    }
    pools = [
        {
            "name": "split",
            "engine": {"type": "vllm", "config": {"handoff": handoff}},
            "nodes": [{"name": f"d{i}", "port": n.port, "launch": False} for i, n in enumerate(nodes)],
        }
    ]
    if single:
        pools.append(
            {
                "name": "single",
                "engine": {"type": "vllm", "config": {"handoff": "none"}},
                "nodes": [{"name": "s0", "port": alone.port, "launch": False}],
            }
        )
    data = {
        "model": {"name": "m", "aliases": ["alias"]},
        "router": {"port": 0, "debug_headers": True, "probe_interval_s": 0.1, "pair_check": False, **(router or {})},
        "prefill": [
            {"name": "p0", "port": prefill.port, "launch": False, "engine": {"type": "vllm", "config": config}}
        ],
        "pools": pools,
        "policy": {
            "type": "slo_threshold",
            "config": {"tpot_below_ms": 20, "fast": pools[0]["name"], "otherwise": pools[0]["name"]},
        },
        **sections,
    }
    server = RouterServer(build_plan(Config.model_validate(data), registry.load()))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
        try:
            await server.start()
            running = Running(server, http)
            if ready:
                await _ready(running)
            yield World(prefill, nodes[0], alone, running)
        finally:
            await server.close()
            for each in (prefill, *nodes, alone):
                each.computing.set()
                await each.close()


async def _ready(running):
    for _ in range(300):
        async with running.http.get(running.url + "/ready") as reply:
            state = await reply.json()
            if reply.status == 200 and not state["problems"]:
                return
        await asyncio.sleep(0.02)
    raise AssertionError(state)
