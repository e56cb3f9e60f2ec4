"""The router's HTTP application."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from pdhub.api.errors import ModelNotFound
from pdhub.router.asgi import CompletionEndpoint, headers_of, read_body
from pdhub.router.context import Context
from pdhub.router.errors import MethodNotAllowed, UnknownPath, reply_of
from pdhub.router.live import explain_live
from pdhub.router.openai import CHAT_PATH, COMPLETIONS_PATH
from pdhub.router.readiness import readiness
from pdhub.router.reload import Reloader
from pdhub.router.service import Service
from pdhub.telemetry.router import CONTENT_TYPE


def make_app(context: Context, reloader: Reloader) -> FastAPI:
    """All paths; whatever else is asked for gets an OpenAI-shaped error."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    config = context.plan.config
    service = Service(context)
    created = int(time.time())
    for path in (CHAT_PATH, COMPLETIONS_PATH):
        endpoint = CompletionEndpoint(service, path, config.router.body_limit_bytes)
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:
            return _error(MethodNotAllowed(f"{request.method} is not allowed here"), dict(error.headers or {}))
        return _error(UnknownPath(f"there is nothing at {request.url.path[:200]}"))

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return _error(error)

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        ok, details = readiness(context.fleet, context.clock())
        if context.draining:
            ok, details = False, {**details, "status": "draining"}
        details["stranded"] = context.recycler.document()
        details["policy"] = _live(context, reloader)
        if context.parsing.problem:
            details["problems"].append(f"parser: {context.parsing.problem}")
        return _json(details, 200 if ok else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": _cards(context, created)})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        for card in _cards(context, created):
            if card["id"] == name:
                return _json(card)
        return _error(ModelNotFound(f"the model `{name[:200]}` does not exist", param="model"))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(context.metrics.render(), media_type=CONTENT_TYPE)

    if config.router.debug_headers:

        @app.get("/debug/requests")
        async def requests() -> Response:
            return _json({"requests": [dataclasses.asdict(r) for r in reversed(context.records)]})

        @app.get("/debug/decisions")
        async def decisions() -> Response:
            return _json({"decisions": [entry.document() for entry in context.decisions.recent()]})

        @app.post("/explain")
        async def dry_run(request: Request) -> Response:
            headers = headers_of(request.scope)
            raw = await read_body(request.receive, headers, config.router.body_limit_bytes)
            return _json(explain_live(context, raw, headers).document())

    return app


def _cards(context: Context, created: int) -> list[dict[str, Any]]:
    """The served model and its aliases. Members that an engine's own card has beyond ours are kept."""
    config, fleet = context.plan.config.model, context.fleet
    known: dict[str, Any] = {}
    for endpoint in fleet.endpoints():
        data = endpoint.info.get("data")
        if isinstance(data, list) and data and isinstance(data[0], dict):
            known = {**data[0], **known}
    lengths = [p.capabilities.max_context for p in fleet.pools.values() if any(n.info for n in p.nodes.values())]
    base: dict[str, Any] = {**known, "object": "model", "created": created, "owned_by": "pdhub", "root": config.name}
    if lengths:
        base["max_model_len"] = max(lengths)
    names = [config.name, *config.aliases]
    return [{**base, "id": name, "parent": None if name == config.name else config.name} for name in names]


def _live(context: Context, reloader: Reloader) -> dict[str, Any]:
    rules, last = context.rules, reloader.last
    reload = None if last is None else {"result": last.result.value, "problem": last.problem, "at": last.wall_s}
    return {"name": rules.policy.name, "version": rules.version, "since": rules.since_s, "reload": reload}


def _json(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")


def _error(error: Exception, headers: dict[str, str] | None = None) -> Response:
    reply = reply_of(error)
    return Response(reply.body, reply.status, {**(headers or {}), **reply.headers})
