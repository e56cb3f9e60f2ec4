"""The only module between the router and a socket to an engine.

Its face is small on purpose (:class:`Upstream`, :class:`UpstreamReply`): the inside can become raw protocols without
anybody noticing. What every implementation keeps: identity encoding, no redirects, no cookies, the endpoint's own
credentials and nobody else's, a limit on every wait, and ``abort`` that closes the connection at once.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import aiohttp
from yarl import URL

from pdhub.api.errors import EngineFailed
from pdhub.router.errors import Unreachable, UpstreamTimeout

LARGE = 1 << 20

log = logging.getLogger("pdhub.router.relay")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: opening a connection, sending until the status line, between two pieces of the body."""

    connect_s: float
    first_byte_s: float
    idle_s: float


class Address(Protocol):
    """Whom to call. ``url`` is scheme://host:port; ``api_key`` goes out as a bearer token."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def api_key(self) -> str | None: ...


class UpstreamReply:
    """An answer whose body may still be under way.

    ``headers`` have lower-case names. Iterate it once for the body. Leaving it as a context aborts what is under way.
    """

    def __init__(self, response: aiohttp.ClientResponse, name: str, idle_s: float) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = {k.lower(): v for k, v in response.headers.items()}
        self._response = response
        self._name = name
        self._idle_s = idle_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Pieces as they arrive. Raises EngineFailed when the connection breaks, UpstreamTimeout when it is silent."""
        while data := await self.read_some(self._idle_s):
            yield data

    async def read_some(self, limit_s: float | None = None) -> bytes:
        """The next piece, empty at the end; waits at most ``limit_s`` (default: the idle limit)."""
        try:
            async with asyncio.timeout(self._idle_s if limit_s is None else limit_s):
                return await self._response.content.readany()
        except TimeoutError as error:
            self.abort()
            raise UpstreamTimeout(f"'{self._name}' stopped answering") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self.abort()
            log.warning("'%s' broke off: %r", self._name, error)
            raise EngineFailed(f"'{self._name}' broke off its answer") from error

    async def read(self, limit: int) -> bytes:
        """The rest of the body. Raises EngineFailed if it is longer than ``limit`` bytes."""
        parts = bytearray()
        async for data in self:
            parts += data
            if len(parts) > limit:
                self.abort()
                raise EngineFailed(f"the answer of '{self._name}' is too long")
        return bytes(parts)

    async def __aenter__(self) -> UpstreamReply:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Close the connection now; the other side notices. Idempotent, and nothing after a complete body."""
        self._response.close()

    async def finish(self, within_s: float = 0.05) -> None:
        """The content is complete: take the end of the body, so that the connection can be used again."""
        try:
            async with asyncio.timeout(within_s):
                while await self._response.content.readany():
                    pass
            self._response.release()
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            self.abort()


def _payload(body: bytes | None) -> bytes | io.BytesIO | None:
    # aiohttp writes large bytes in one go and warns about it; a file is written piece by piece.
    return io.BytesIO(body) if body is not None and len(body) > LARGE else body


def _why(error: Exception) -> str:
    """Without aiohttp's connection key, in which nobody finds the reason."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return f"{type(cause).__name__}: {cause}"


class Upstream:
    """Connections to all engines and instances."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._lost: set[str] = set()

    async def start(self) -> None:
        """Call on the loop that will use it."""
        # A limit here would let one slow endpoint starve the others; admission bounds what is in flight.
        # Idle connections go before any usual server closes them, which avoids most stale ones.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
            read_bufsize=1 << 20,
        )

    async def open(
        self,
        endpoint: Address,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        timeouts: Timeouts,
    ) -> UpstreamReply:
        """Send a call and wait for its status line.

        Raises:
            Unreachable: no connection, or it broke. UpstreamTimeout: no answer in time.
        """
        assert self._session is not None, "start() first"
        sent = {"accept-encoding": "identity", **headers}
        if body is not None:
            sent.setdefault("content-type", "application/json")
        if endpoint.api_key is not None:
            sent["authorization"] = f"Bearer {endpoint.api_key}"
        limits = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s, connect=timeouts.connect_s)
        try:
            async with asyncio.timeout(timeouts.connect_s + timeouts.first_byte_s):
                response = await self._session.request(
                    method,
                    URL(endpoint.url + path),
                    data=_payload(body),
                    headers=sent,
                    allow_redirects=False,
                    timeout=limits,
                )
        except TimeoutError as error:  # aiohttp's own time-outs are TimeoutErrors too
            raise UpstreamTimeout(f"'{endpoint.name}' did not answer in time") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # Said once until it can be reached again: it is probed every second.
            level = logging.DEBUG if endpoint.url in self._lost else logging.WARNING
            self._lost.add(endpoint.url)
            log.log(level, "'%s' at %s cannot be reached: %s", endpoint.name, endpoint.url, _why(error))
            raise Unreachable(f"'{endpoint.name}' cannot be reached") from error
        self._lost.discard(endpoint.url)
        return UpstreamReply(response, endpoint.name, timeouts.idle_s)

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None
