"""The HTTP face of an embedded prefill instance: the subset of vLLM's server that a prefill leg uses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from pdhub.api.errors import PDHubError, RequestCancelled
from pdhub.api.prefill import PrefillInfo
from pdhub.node.body import read_body
from pdhub.node.prefill_metrics import PrefillMetrics
from pdhub.node.prefill_request import parse
from pdhub.node.prefill_service import PrefillService
from pdhub.sender import LandingTooSmall
from pdhub.telemetry.node import CONTENT_TYPE
from pdhub.wire.errors import body_of, headers_of, status_of
from pdhub.wire.http import PrefillInfoReply

JSON = "application/json"


def make_app(
    service: PrefillService,
    info: PrefillInfo,
    reply: Callable[[], PrefillInfoReply],
    metrics: PrefillMetrics,
    *,
    model: str,
    aliases: list[str],
    body_limit: int,
) -> FastAPI:
    """The application.

    Args:
        reply: what ``/prefill`` answers.
        model, aliases: ids that requests may name. body_limit: bytes.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    card = {
        "id": model, "object": "model", "created": 0, "owned_by": "pdhub", "root": model, "parent": None,
        "max_model_len": info.capabilities.max_context,
    }  # fmt: skip

    async def leg(request: Request, chat: bool) -> Response:
        try:
            raw = await read_body(request, body_limit)
            asked = parse(raw, chat=chat, models=[model, *aliases], info=info)
            job, task = service.begin(asked, _request_id(request))
        except PDHubError as error:
            return _failure(error)
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # also when the server cancels us: nobody reads the answer then
            if not task.done():
                job.stop(RequestCancelled("the client disconnected"))
            gone.cancel()
        if not task.done():
            return Response(status_code=499)
        failure = task.exception()
        return _failure(failure) if failure is not None else _json(task.result())

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await leg(request, True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await leg(request, False)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card]})

    @app.get("/health")
    async def health() -> Response:
        draining = service.draining
        return _json({"status": "draining" if draining else "ok"}, 503 if draining else 200)

    @app.get("/prefill")
    async def prefill() -> Response:
        return _json(reply())

    @app.get("/metrics")
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return app


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _request_id(request: Request) -> str:
    """The caller's id, for logs and the answer only; never a key."""
    given = request.headers.get("x-request-id", "")
    return given if 0 < len(given) <= 128 and given.isascii() and given.isprintable() else secrets.token_hex(16)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, JSON)


def _failure(error: BaseException) -> Response:
    if isinstance(error, LandingTooSmall):
        body = body_of(error)
        body["error"] |= {"type": "invalid_request_error", "need": error.need}
        return _json(body, 409)
    return _json(body_of(error), status_of(error), headers_of(error))
