"""Serve an ASGI application on a socket that is bound first: the port is known, and a used one is a clear error."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

from pdhub.api.errors import ConfigError


def bind(host: str, port: int, what: str) -> socket.socket:
    """A listening TCP socket. ``what`` names the owner in the error."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol said: asyncio disables Nagle's algorithm only then, and answers would wait 40 ms for an ACK.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"{what} cannot listen on {host}:{port}: {error.strerror or error}",
            hint=remedy(error),
        ) from error
    sock.setblocking(False)
    return sock


def elsewhere(error: OSError) -> bool:
    """Nobody can listen there because the address is none of this machine."""
    return isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL


def remedy(error: OSError) -> str:
    """What to do when nobody can listen there."""
    if elsewhere(error):
        return "give an address of this machine; 0.0.0.0 stands for all that it has"
    if isinstance(error, PermissionError):
        return "choose a port from 1024 on; those below belong to the administrator"
    return "choose another port (0 takes a free one), or stop the process that uses this one"


class HttpServer:
    """uvicorn inside a running loop, without its signal handlers: the caller owns the life cycle."""

    def __init__(self, app: Any, host: str, port: int, what: str) -> None:
        self.app = app
        self.host = host
        self.port = port
        self.what = what
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Bind, then serve in a task. ``port`` is the real one afterwards. Raises ConfigError if it is taken."""
        import uvicorn

        sock = bind(self.host, self.port, self.what)
        self.port = sock.getsockname()[1]
        config = uvicorn.Config(
            self.app, http="httptools", ws="none", lifespan="on", log_config=None, access_log=False,
            timeout_graceful_shutdown=5, timeout_keep_alive=75, server_header=False,
        )  # fmt: skip
        server = uvicorn.Server(config)
        self._server = server
        self._task = asyncio.create_task(server._serve([sock]), name=f"http {self.what}")
        while not server.started:
            if self._task.done():
                self._task.result()
                raise ConfigError(f"{self.what} did not start")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Stop accepting, let open answers end (at most 5 s), close. Idempotent."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=8)
        if not self._task.done():
            self._server.force_exit = True
            await asyncio.wait([self._task], timeout=2)
        self._server = None
