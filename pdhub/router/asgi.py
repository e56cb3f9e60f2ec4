"""The two completion endpoints, between ASGI and :mod:`pdhub.router.service`.

Plain ASGI below the web framework: the body must be bounded while it is read, and a client that leaves must be
noticed while the answer is still being made, stream or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from pdhub.router.service import Service
from pdhub.wire.errors import BodyTooLarge

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

DRAIN_S = 1.0
DRAIN_BYTES = 4 << 20


class ClientLeft(Exception):
    """The client disconnected before its body was complete."""


class AsgiSink:
    """A :class:`~pdhub.router.sink.Sink` over ASGI's ``send``."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.ended = False

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        self.ended = True  # before the send: the server reports a disconnect as soon as an answer is complete
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class CompletionEndpoint:
    """An ASGI application for one path.

    Args:
        path: the path as the service knows it. limit: bytes of a body; a larger one is refused unread.
    """

    def __init__(self, service: Service, path: str, limit: int) -> None:
        self._service = service
        self._path = path
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        sink = AsgiSink(send)
        try:
            body = await read_body(receive, headers, self._limit)
        except ClientLeft:
            return
        except BodyTooLarge as error:
            await self._service.refuse(headers, error, _Draining(sink, receive))
            return
        work = asyncio.create_task(self._service.serve(self._path, headers, body, sink))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if sink.ended:
                await asyncio.wait([work])  # only its bookkeeping is left; the client has the whole answer
        finally:
            gone.cancel()
            work.cancel()  # nothing if it is done
            await asyncio.gather(work, gone, return_exceptions=True)


class _Draining:
    """Sends an answer whole, then swallows a little of what the client still sends: a connection that is closed under
    a sender is reset, and the answer with it."""

    started = False

    def __init__(self, sink: AsgiSink, receive: Receive) -> None:
        self._sink = sink
        self._receive = receive
        self._status = 500
        self._headers: dict[str, str] = {}
        self._body = b""

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self._status, self._headers = status, dict(headers)

    async def write(self, data: bytes) -> None:
        self._body += data

    async def end(self) -> None:
        sized = {**self._headers, "content-length": str(len(self._body)), "connection": "close"}
        await self._sink.start(self._status, sized)
        await self._sink.write(self._body)
        taken = 0
        try:
            async with asyncio.timeout(DRAIN_S):
                while taken < DRAIN_BYTES:
                    message = await self._receive()
                    taken += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            pass
        await self._sink.end()


def headers_of(scope: Scope) -> dict[str, str]:
    """Lower-cased names; of a repeated header the first counts."""
    out: dict[str, str] = {}
    for name, value in scope["headers"]:
        out.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return out


async def read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as that is certain, ClientLeft."""
    error = BodyTooLarge(f"the body is larger than {limit} bytes")
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limit:
        raise error
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > limit:
            raise error
        if not message.get("more_body", False):
            return bytes(body)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
