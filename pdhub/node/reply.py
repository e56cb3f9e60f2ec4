"""The HTTP answer of POST /decode: a status that is still free until the first token, then one frame a line."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdhub.api.errors import EngineFailed, PDHubError, RequestCancelled
from pdhub.node.stream import DecodeStream
from pdhub.wire import errors as http_errors
from pdhub.wire.http import ErrorBody, Frame

log = logging.getLogger("pdhub.node")

SEND_WITHIN_S: Final = 30.0
"""A router that takes no byte for so long is treated as gone: it holds a slot."""

_encode = msgspec.json.Encoder().encode


class DecodeReply(Response):
    """Drives a :class:`DecodeStream`; a dropped connection cancels the transfer in any phase."""

    def __init__(self, stream: DecodeStream, transfer_id: str) -> None:
        self.status_code = 200
        self.background = None
        self._stream = stream
        self._transfer_id = transfer_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.get_running_loop().create_task(self._watch(receive))
        out = _Lines(send)
        try:
            await self._stream.run(out.frames)
            await out.end()
        except PDHubError as error:
            await self._fail(out, error)
        except OSError as error:
            log.info("transfer %s: the router does not read: %s", self._transfer_id, error)
        except Exception:
            log.exception("transfer %s failed", self._transfer_id)
            await self._fail(out, EngineFailed("internal error", code="internal_error"))
        finally:
            watch.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        self._stream.dropped()

    async def _fail(self, out: _Lines, error: PDHubError) -> None:
        if isinstance(error, RequestCancelled):
            log.info("transfer %s cancelled", self._transfer_id)
        else:
            log.warning("transfer %s: %s", self._transfer_id, error)
        if not out.started:
            await out.document(error)
            return
        inner: dict[str, Any] = http_errors.body_of(error)["error"]
        await out.frames([Frame(error=ErrorBody(inner["message"], inner["code"], inner["type"], inner["param"]))])
        await out.end()


class _Lines:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def frames(self, frames: list[Frame]) -> None:
        body = b"".join(_encode(frame) + b"\n" for frame in frames)
        if not self.started:
            self.started = True
            headers = [(b"content-type", b"application/x-ndjson")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._body(body, True)

    async def end(self) -> None:
        await self._body(b"", False)

    async def document(self, error: PDHubError) -> None:
        body = _encode(http_errors.body_of(error))
        extra = [(k.encode(), v.encode()) for k, v in http_errors.headers_of(error).items()]
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *extra]
        status = http_errors.status_of(error)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._body(body, False)

    async def _body(self, body: bytes, more: bool) -> None:
        try:
            async with asyncio.timeout(SEND_WITHIN_S):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError as error:
            raise OSError(f"nothing was read for {SEND_WITHIN_S} s") from error
