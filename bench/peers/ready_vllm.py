"""A vLLM prefill server that has computed every prompt already: its answers have the real shape, and pdhub's own sender
hands one byte of KV a token over before it answers. What it does is not counted: it keeps the times at its borders."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from aiohttp import web
from peers.blank_engine import LAYOUT

from pdhub import __version__
from pdhub.api import KVChunk, Region
from pdhub.sender import Sender
from pdhub.transports.plugin import TcpConfig
from pdhub.transports.tcp import TcpTransport
from pdhub.wire.control import PROTOCOL
from pdhub.wire.http import CapabilitiesBody, HandoffParams, PrefillInfoReply, to_json

FIRST_TOKEN = 97
CONTEXT = 65_536


class _Params(msgspec.Struct):
    pdhub: HandoffParams


class _Body(msgspec.Struct):
    kv_transfer_params: _Params


_body = msgspec.json.Decoder(_Body)


class ReadyVLLM:
    """Args:
    model: its name.

    ``prompt`` is what every request is said to be in tokens. ``asked``, ``answered``: monotonic seconds of the last
    request whose body had come, and of its answer.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._transport = TcpTransport(TcpConfig())
        self._transport.open()
        self._sender = Sender(
            self._transport, name="ready", layout=LAYOUT, chunk_tokens=CONTEXT, staging_bytes=4 * CONTEXT
        )
        self._runners: list[web.AppRunner] = []
        self._answers: dict[tuple[int, bool], bytes] = {}
        self.prompt: list[int] = []
        self.asked = self.answered = 0.0

    async def start(self, port: int, connector_port: int) -> None:
        """Listen as the server and as the connector inside it."""
        server = web.Application(client_max_size=64 << 20)
        server.router.add_get("/v1/models", self._models)
        server.router.add_get("/metrics", self._metrics)
        server.router.add_post("/v1/completions", self._serve)
        server.router.add_post("/v1/chat/completions", self._serve)
        connector = web.Application()
        connector.router.add_get("/prefill", self._tell)
        for app, where in ((server, port), (connector, connector_port)):
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", where).start()
            self._runners.append(runner)

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()
        await asyncio.to_thread(self._sender.close)
        self._transport.close()

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self._model, "object": "model", "max_model_len": CONTEXT, "owned_by": "vllm"}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n")

    async def _tell(self, request: web.Request) -> web.Response:
        told = PrefillInfoReply(
            node="ready", version=__version__, protocol=PROTOCOL, engine="vllm", model=self._model, transport="tcp",
            fingerprint=LAYOUT.fingerprint, max_model_len=CONTEXT,
            capabilities=CapabilitiesBody(["sampling", "ignore_eos", "top_k", "min_p", "seed"], CONTEXT),
        )  # fmt: skip
        return web.Response(body=to_json(told), content_type="application/json")

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.asked = time.monotonic()
        params = _body.decode(raw).kv_transfer_params.pdhub
        await asyncio.to_thread(self._hand_over, params, len(self.prompt))
        body = self._answer(request.path.endswith("chat/completions"))
        self.answered = time.monotonic()
        return web.Response(body=body, content_type="application/json")

    def _hand_over(self, params: HandoffParams, tokens: int) -> None:
        session = self._sender.join(params, tokens)
        nbytes = LAYOUT.landing_bytes(tokens)
        session.send(KVChunk(0, tokens, nbytes, lambda region: _zero(region, nbytes)))
        session.finish()

    def _answer(self, chat: bool) -> bytes:
        key = (id(self.prompt), chat)
        if key not in self._answers:
            self._answers = {key: _answer(self._model, self.prompt, chat)}
        return self._answers[key]


def _zero(region: Region, nbytes: int) -> None:
    assert region.view is not None
    region.view[:nbytes] = bytes(nbytes)


def _answer(model: str, prompt: list[int], chat: bool) -> bytes:
    """As vLLM 0.26 answers with ``return_token_ids``: the prompt's ids at the top for chat, else in the choice."""
    choice: dict[str, Any] = {"index": 0}
    if chat:
        choice["message"] = {
            "role": "assistant", "content": "a", "refusal": None, "annotations": None, "audio": None,
            "function_call": None, "tool_calls": [], "reasoning": None,
        }  # fmt: skip
    else:
        choice["text"] = "a"
    choice |= {"logprobs": None, "finish_reason": "length", "stop_reason": None, "token_ids": [FIRST_TOKEN]}
    ids = {"prompt_logprobs": None, "prompt_token_ids": prompt}
    document: dict[str, Any] = {
        "id": "cmpl-0", "object": "chat.completion" if chat else "text_completion", "created": 1_700_000_000,
        "model": model, "choices": [choice if chat else {**choice, **ids}], "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": len(prompt), "total_tokens": len(prompt) + 1, "completion_tokens": 1,
            "prompt_tokens_details": None,
        },
    }  # fmt: skip
    return msgspec.json.encode({**document, **(ids if chat else {}), "kv_transfer_params": None})
