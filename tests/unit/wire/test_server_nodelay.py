"""A server that leaves Nagle's algorithm on answers 40 ms late, whatever it does."""

from __future__ import annotations

import asyncio
import socket

from pdhub.wire.server import bind


async def test_accepted_connections_send_at_once() -> None:
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        found.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind("127.0.0.1", 0, "test")
    server = await asyncio.start_server(accepted, sock=listener)
    _, writer = await asyncio.open_connection(*listener.getsockname())
    assert await found
    writer.close()
    server.close()
    await server.wait_closed()
