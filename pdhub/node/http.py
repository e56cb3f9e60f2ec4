"""A node's HTTP side, for the router: claim, decode, cancel, and what the router and a person want to know."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from pdhub.api.errors import PDHubError
from pdhub.node.body import read_body
from pdhub.node.receiver import Receiver
from pdhub.node.reply import DecodeReply
from pdhub.node.stream import DecodeStream
from pdhub.node.validate import cancel_body, claim_body, decode_body
from pdhub.telemetry.node import CONTENT_TYPE
from pdhub.wire import errors as http_errors
from pdhub.wire import http as wire

log = logging.getLogger("pdhub.node")

SMALL_BODY: Final = 64 << 10
BYTES_A_TOKEN: Final = 16


def make_app(
    receiver: Receiver,
    info: Callable[[], wire.NodeInfo],
    *,
    verify: bool,
    connections: Callable[[], int],
    body_limit: int,
) -> FastAPI:
    """The application.

    Args:
        info: answers ``/capabilities``. verify: compare digests before inject. connections: of the control channel.
        body_limit: bytes that a router lets a client send; all of it may be biases and stop ids.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    decode_limit = SMALL_BODY + body_limit + BYTES_A_TOKEN * receiver.info.capabilities.max_context

    @app.exception_handler(PDHubError)
    async def refused(request: Request, error: Exception) -> Response:
        return _json_bytes(_error(error), http_errors.status_of(error), http_errors.headers_of(error))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        log.error("%s failed", request.url.path, exc_info=error)
        return _json_bytes(_error(error), 500)

    @app.post("/claim")
    async def claim(request: Request) -> Response:
        body = claim_body(await read_body(request, SMALL_BODY))
        lease, fingerprint = receiver.claim(body)
        host, port = info().control
        terms = lease.terms
        return _json(
            wire.ClaimReply(
                body.transfer_id, lease.generation, host, port, terms.capacity_tokens, fingerprint, terms.prompt_limit
            )
        )

    @app.post("/decode")
    async def decode(request: Request) -> Response:
        body, asked = decode_body(await read_body(request, decode_limit))
        return DecodeReply(DecodeStream(receiver, body, asked, verify=verify), body.transfer_id)

    @app.post("/cancel")
    async def cancel(request: Request) -> Response:
        body = cancel_body(await read_body(request, SMALL_BODY))
        receiver.cancel(body.transfer_id, body.reason[:200])
        return _json_bytes(b"{}")

    @app.get("/health")
    async def health() -> Response:
        if receiver.refuse_claims is not None:
            return _json_bytes(b'{"status":"draining"}', 503)
        return _json_bytes(b'{"status":"ok"}')

    @app.get("/capabilities")
    async def capabilities() -> Response:
        return _json(info())

    @app.get("/load")
    async def load() -> Response:
        return _json(load_of(receiver))

    @app.get("/metrics")
    async def metrics() -> Response:
        table = receiver.table
        now = {
            "landings": table.landings.free,
            "slots": receiver.slots.free,
            "quarantined": table.counts()["quarantined"],
            "waiting": receiver.slots.waiting,
            "connections": connections(),
        }
        return Response(receiver.metrics.render(table.counts(), now), media_type=CONTENT_TYPE)

    return app


def load_of(receiver: Receiver) -> wire.LoadReply:
    """The host's counters and the engine's reading."""
    engine = receiver.engine.load()
    counts = {state: count for state, count in receiver.table.counts().items() if count}
    return wire.LoadReply(
        landings_free=receiver.table.landings.free,
        slots_free=receiver.slots.free,
        leases=counts,
        quarantined=counts.get("quarantined", 0),
        running=engine.running,
        waiting=engine.waiting,
        kv_usage=engine.kv_usage,
        remaining_tokens=engine.remaining_tokens,
    )


def _error(error: BaseException) -> bytes:
    return msgspec.json.encode(http_errors.body_of(error))


def _json(value: msgspec.Struct) -> Response:
    return _json_bytes(wire.to_json(value))


def _json_bytes(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")
