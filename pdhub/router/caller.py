"""Turns described calls into HTTP exchanges with one endpoint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from pdhub.api.client import Call, Reply
from pdhub.api.errors import EngineFailed
from pdhub.config.models import RouterConfig
from pdhub.core.legs import leg_body
from pdhub.router.endpoint import Endpoint
from pdhub.router.errors import UpstreamTimeout
from pdhub.router.openai import ClientRequest
from pdhub.router.refusal import Reading, refusal
from pdhub.router.relay import Timeouts, Upstream, UpstreamReply

T = TypeVar("T")

DOCUMENT_LIMIT = 64 << 20
_CHECK_S = 0.25


class Caller:
    """Args:
    config: time-outs. clock: monotonic seconds.
    """

    def __init__(self, upstream: Upstream, config: RouterConfig, clock: Callable[[], float]) -> None:
        self._upstream = upstream
        self._config = config
        self._clock = clock

    async def open(
        self,
        endpoint: Endpoint,
        call: Call,
        request: ClientRequest | None = None,
        headers: Mapping[str, str] | None = None,
        limit_s: float | None = None,
        refused: Reading | None = None,
    ) -> UpstreamReply:
        """Send, and wait for the status line.

        Args:
            request: whose body the call starts from; None for calls with a body of their own.
            limit_s: longest wait for the status line; default ``first_byte_timeout_s``.
            refused: what the endpoint's client makes of a JSON answer with another status, before the host does.

        Raises:
            EngineFailed, UpstreamTimeout, and what any status other than 200 means.
        """
        limit = self._config.first_byte_timeout_s if limit_s is None else limit_s
        timeouts = Timeouts(self._config.connect_timeout_s, limit, self._config.idle_timeout_s)
        body = None
        if call.method == "POST":
            raw, parsed, path = (request.raw, request.body, request.endpoint) if request else (b"{}", {}, "")
            body = leg_body(call, raw, parsed, path)
        if not call.path.startswith("/") or call.path.startswith("//"):
            raise EngineFailed(f"the client of '{endpoint.name}' described a path that is not one: {call.path!r}")
        address = endpoint if call.origin is None else _elsewhere(endpoint, call)
        sending = self._upstream.open(
            address, call.method, call.path, body, {**(headers or {}), **call.headers}, timeouts
        )
        reply = await self.while_alive(endpoint, sending)
        endpoint.seen(self._clock())
        if reply.status != 200:
            # what is only asked is asked again and again: the prober says it, once
            level = logging.DEBUG if call.method == "GET" else logging.WARNING
            async with reply:
                raise await refusal(reply, endpoint, refused, level)
        if call.origin is None:
            endpoint.heard(reply.headers, self._clock())
        return reply

    async def document(
        self,
        endpoint: Endpoint,
        call: Call,
        request: ClientRequest | None = None,
        headers: Mapping[str, str] | None = None,
        limit_s: float | None = None,
    ) -> dict[str, Any]:
        """Send, and read a JSON object. Raises as :meth:`open`; EngineFailed if it is none."""
        async with await self.open(endpoint, call, request, headers, limit_s) as reply:
            raw = await reply.read(DOCUMENT_LIMIT)
        try:
            document = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise EngineFailed(f"'{endpoint.name}' answered with something that is not JSON") from error
        if not isinstance(document, dict):
            raise EngineFailed(f"'{endpoint.name}' answered with something that is not a JSON object")
        return document

    async def answer(self, endpoint: Endpoint, call: Call) -> dict[str, Any]:
        """As :meth:`document`, for calls without a body; a reply of text comes as ``{"text": …}``."""
        if call.reply is not Reply.TEXT:
            return await self.document(endpoint, call)
        async with await self.open(endpoint, call) as reply:
            return {"text": (await reply.read(DOCUMENT_LIMIT)).decode(errors="replace")}

    async def while_alive(self, endpoint: Endpoint, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work``, but not for an endpoint that is gone.

        Computing takes as long as it takes. A hosted endpoint that is silent on every channel, probes
        included, for ``idle_timeout_s`` has stopped; waiting longer would not bring it back.
        """
        if not endpoint.hosted:
            return await work
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=_CHECK_S))[0]:
                if endpoint.silent(self._clock(), self._config.idle_timeout_s):
                    raise UpstreamTimeout(f"'{endpoint.name}' is silent")
        except BaseException:
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(result, UpstreamReply):  # it came at the very moment when nobody wanted it any more
                result.abort()
            raise
        return task.result()


@dataclass(frozen=True, slots=True)
class _Site:
    """Another server that belongs to an endpoint. It gets none of its credentials."""

    name: str
    url: str
    api_key: None = None


def _elsewhere(endpoint: Endpoint, call: Call) -> _Site:
    """Where ``call.origin`` says, if the configuration allows it."""
    origin = call.origin or ""
    parts = urlsplit(origin)
    same = parts.hostname is not None and parts.hostname == urlsplit(endpoint.url).hostname
    bare = (
        parts.scheme in ("http", "https") and not parts.path.strip("/") and not parts.query and "@" not in parts.netloc
    )
    if call.method != "GET" or not bare or not (same or origin in endpoint.config.values()):
        raise EngineFailed(f"the client of '{endpoint.name}' described an address that is not configured: {origin!r}")
    return _Site(endpoint.name, origin)
