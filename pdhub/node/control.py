"""The control channel's server: senders say hello, join, are done or leave.

Nobody is trusted: anything that is no frame, out of order or not a sender's message closes the connection, and a
closed connection means that all its writers vanished. State is bounded: connections are counted, a message is at
most ``MAX_FRAME`` bytes, and the next one is read only after the last was answered.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

from pdhub import __version__
from pdhub.node.receiver import Receiver
from pdhub.wire.control import (
    PROTOCOL,
    ControlMessage,
    Decoder,
    Done,
    FrameError,
    Hello,
    Join,
    Leave,
    Refused,
    RefusedCode,
    Welcome,
    encode,
)
from pdhub.wire.server import bind

log = logging.getLogger("pdhub.node")

CONNECTIONS: Final = 256
HELLO_WITHIN_S: Final = 5.0
UNSENT_LIMIT: Final = 1 << 20
"""Bytes that may wait for a sender that does not read; then it is cut off."""

_READ = 1 << 16


class ControlServer:
    """One a node.

    Args:
        receiver: gets the messages.
        host, port: to listen on; port 0 takes a free one.
        node, transport, metadata: for the welcome.
        accepts: fingerprints of layouts.
    """

    def __init__(
        self,
        receiver: Receiver,
        host: str,
        port: int,
        *,
        node: str,
        transport: str,
        metadata: bytes,
        accepts: frozenset[str],
        connections: int = CONNECTIONS,
        hello_within_s: float = HELLO_WITHIN_S,
    ) -> None:
        self._receiver = receiver
        self.host = host
        self.port = port
        self._welcome = Welcome(node, __version__, transport, metadata)
        self._accepts = accepts
        self._limit = connections
        self._hello_within_s = hello_within_s
        self._server: asyncio.Server | None = None
        self._open: dict[str, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = 0

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._open)

    async def start(self) -> None:
        """Raises ConfigError if the port is taken."""
        sock = bind(self.host, self.port, f"control channel of {self._welcome.node}")
        self.port = sock.getsockname()[1]
        self._server = await asyncio.start_server(self._accept, sock=sock, limit=_READ)

    async def close(self) -> None:
        """Cut every connection. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._open.values()):
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if len(self._open) >= self._limit:
            log.warning("refused a control connection: %d are open", self._limit)
            writer.transport.abort()
            return
        self._count += 1
        owner = f"{self._welcome.node}#{self._count}"
        self._open[owner] = writer
        _keep_alive(writer)
        try:
            await self._serve(owner, reader, writer)
        except FrameError as error:
            log.warning("control connection %s closed: %s", owner, error)
        except TimeoutError:
            log.warning("control connection %s closed: no hello", owner)
        except OSError as error:
            log.info("control connection %s lost: %s", owner, error)
        finally:
            del self._open[owner]
            self._receiver.vanished(owner)
            writer.close()

    async def _serve(self, owner: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder()
        waiting: list[ControlMessage] = []
        async with asyncio.timeout(self._hello_within_s):
            while not waiting:
                data = await reader.read(_READ)
                if not data:
                    return
                waiting = decoder.feed(data)
        hello = waiting.pop(0)
        if not isinstance(hello, Hello):
            raise FrameError(f"{type(hello).__name__} before hello")
        refused = self._check(hello)
        if refused is not None:
            self._receiver.metrics.refused(refused.code)
            log.warning("sender %.80r refused: %s", hello.sender, refused.message)
            writer.write(encode(refused))
            await writer.drain()
            return
        self._receiver.connected(owner, lambda message: _send(writer, message))
        writer.write(encode(self._welcome))
        while True:
            for message in waiting:
                await self._handle(owner, hello.fingerprint, message)
            await writer.drain()
            data = await reader.read(_READ)
            if not data:
                return
            waiting = decoder.feed(data)

    def _check(self, hello: Hello) -> Refused | None:
        if hello.protocol != PROTOCOL:
            text = f"this node speaks protocol {PROTOCOL}, the sender {hello.protocol}: run the same pdhub on both"
            return Refused("", RefusedCode.PROTOCOL, text)
        if hello.transport != self._welcome.transport:
            text = f"this node's transport is {self._welcome.transport}, not {hello.transport[:64]}"
            return Refused("", RefusedCode.TRANSPORT, text)
        if hello.fingerprint not in self._accepts:
            return Refused("", RefusedCode.LAYOUT, "this node does not take the sender's KV layout")
        if self._receiver.refuse_joins:
            return Refused("", RefusedCode.DRAINING, "this node is closing")
        return None

    async def _handle(self, owner: str, fingerprint: str, message: ControlMessage) -> None:
        match message:
            case Join():
                await self._receiver.join(owner, fingerprint, message)
            case Done():
                self._receiver.done(owner, message)
            case Leave():
                self._receiver.leave(owner, message)
            case _:
                raise FrameError(f"{type(message).__name__} is not a sender's message")


def _send(writer: asyncio.StreamWriter, message: ControlMessage) -> None:
    if writer.is_closing():
        return
    if writer.transport.get_write_buffer_size() > UNSENT_LIMIT:
        writer.transport.abort()
        return
    writer.write(encode(message))


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """A host that went away without a word is noticed within about ten seconds."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
