"""Reaching a target over tcp."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from pdhub.api import TransferFailed
from pdhub.transports.tcp_socket import StreamEnded, limit, receive, send, tune
from pdhub.transports.tcp_wire import ANSWER, HELLO, MAGIC, PROTOCOL, Purpose, Status


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    timeout_s: float
    buffer_bytes: int

    def dial(self, purpose: Purpose, token: bytes) -> tuple[socket.socket, int]:
        """A connection that the target accepted, and the region's size. Raises TransferFailed."""
        where = f"{self.host}:{self.port}"
        sock: socket.socket | None = None
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            family, _, _, _, target = found[0]
            sock = socket.socket(family, socket.SOCK_STREAM)
            tune(sock, self.buffer_bytes)
            sock.settimeout(self.timeout_s)
            sock.connect(target)
            sock.settimeout(None)
            limit(sock, socket.SO_RCVTIMEO, self.timeout_s)
            limit(sock, socket.SO_SNDTIMEO, self.timeout_s)
            send(sock, HELLO.pack(MAGIC, PROTOCOL, purpose, token))
            status, nbytes = ANSWER.unpack(receive(sock, ANSWER.size))
        except (OSError, StreamEnded) as error:
            if sock is not None:
                sock.close()
            raise TransferFailed(f"the target at {where} cannot be reached over tcp: {error}") from error
        if status == Status.OK:
            return sock, nbytes
        sock.close()
        if status == Status.UNKNOWN_GRANT:
            raise TransferFailed("the target does not know this grant")
        raise TransferFailed(f"the target at {where} speaks tcp protocol {nbytes}, this side {PROTOCOL}")
