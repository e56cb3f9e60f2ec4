"""The target's end of tcp: receives straight into regions, one thread a granted connection."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdhub.api import PluginError, Region
from pdhub.transports.tcp_socket import StreamEnded, limit, receive, receive_into, send, shut, tune
from pdhub.transports.tcp_wire import ACK, ANSWER, FRAME, HELLO, MAGIC, PROTOCOL, TOKEN_BYTES, Kind, Purpose, Status

log = logging.getLogger("pdhub.transports")

PIECE = 4 << 20
"""Bytes received between two looks at whether the grant still stands."""


@dataclass(eq=False)
class Landing:
    """A region that was granted. ``revoked`` never goes back; ``then`` is called when nobody can write any more."""

    region: Region
    tokens: set[bytes] = field(default_factory=set)
    connections: set[Connection] = field(default_factory=set)
    revoked: bool = False
    then: Callable[[], None] | None = None


@dataclass(eq=False)
class Connection:
    sock: socket.socket
    thread: threading.Thread | None = None
    token: bytes = b""
    stopping: bool = False

    def stop(self) -> None:
        """Make its thread end soon. Bytes that the kernel already holds are not read any more."""
        self.stopping = True
        shut(self.sock)


class TcpTarget:
    """Listens for writers. Thread-safe.

    Args:
        host, port: to listen on; port 0 takes a free one.
        timeout_s: longest time for a writer to present its grant.
        max_connections: more are closed at once.
    """

    def __init__(self, host: str, port: int, timeout_s: float, max_connections: int, buffer_bytes: int) -> None:
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._buffer_bytes = buffer_bytes
        self._lock = threading.Lock()
        self._landings: dict[str, Landing] = {}
        self._tokens: dict[bytes, Landing] = {}
        self._connections: set[Connection] = set()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    def serve(self) -> int:
        """Start listening, once; the port. Raises PluginError if it is taken."""
        with self._lock:
            if self._listener is None:
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                listener = socket.socket(family, socket.SOCK_STREAM)
                try:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if self._buffer_bytes:  # the window scale is fixed at the handshake, so before listen
                        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)
                    listener.bind((self._host, self._port))
                    listener.listen(128)
                except OSError as error:
                    listener.close()
                    raise PluginError(
                        f"tcp transport cannot listen on {self._host}:{self._port}: {error.strerror or error}",
                        hint="choose another port, or 0 for a free one",
                    ) from error
                self._listener = listener
                self._acceptor = threading.Thread(target=self._accept, name="pdhub tcp accept", daemon=True)
                self._acceptor.start()
            port: int = self._listener.getsockname()[1]
            return port

    def grant(self, region: Region) -> bytes:
        """A token that opens the region. Raises ValueError once it was fenced."""
        with self._lock:
            landing = self._landings.setdefault(region.id, Landing(region))
            if landing.revoked:
                raise ValueError(f"region {region.id!r} was fenced")
            token = secrets.token_bytes(TOKEN_BYTES)
            landing.tokens.add(token)
            self._tokens[token] = landing
            return token

    def revoke(self, region_id: str, within_s: float) -> bool:
        """End every grant and connection of the region. True if no thread can write into it any more."""
        with self._lock:
            landing = self._landings.get(region_id)
            if landing is None:
                return True
            connections = self._revoke(landing)
        return self._stop(connections, within_s)

    def free(self, region_id: str, then: Callable[[], None]) -> None:
        """End every grant and connection of the region, and call ``then`` once no thread can write into it any more.
        Does not wait for that: the host frees landings on its event loop."""
        with self._lock:
            landing = self._landings.pop(region_id, None)
            connections = [] if landing is None else self._revoke(landing)
            if landing is not None and connections:
                landing.then = then
        for connection in connections:
            connection.stop()
        if not connections:
            then()

    def _revoke(self, landing: Landing) -> list[Connection]:
        landing.revoked = True
        for token in landing.tokens:
            self._tokens.pop(token, None)
        landing.tokens.clear()
        return list(landing.connections)

    def close(self) -> None:
        """Stop listening and every connection. Idempotent."""
        with self._lock:
            listener, self._listener = self._listener, None
            acceptor, self._acceptor = self._acceptor, None
        if listener is not None and acceptor is not None:
            shut(listener)
            acceptor.join()
            listener.close()
        with self._lock:
            self._tokens.clear()
            connections = list(self._connections)
        if not self._stop(connections, self._timeout_s):
            log.error("tcp: a connection's thread did not end within %s s", self._timeout_s)

    def _stop(self, connections: list[Connection], within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        for connection in connections:
            connection.stop()
        ended = True
        for connection in connections:
            if connection.thread is not None and connection.thread is not threading.current_thread():
                connection.thread.join(max(0.0, deadline - time.monotonic()))
                ended = ended and not connection.thread.is_alive()
        return ended

    # -- threads --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        listener = self._listener
        while listener is not None and self._listener is listener:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._listener is not listener:
                    return
                log.warning("tcp: a writer could not connect: %s", error)
                time.sleep(0.1)  # out of descriptors: do not spin
                continue
            connection = Connection(sock)
            with self._lock:
                if self._listener is not listener or len(self._connections) >= self._max_connections:
                    sock.close()
                    continue
                self._connections.add(connection)
                connection.thread = threading.Thread(
                    target=self._run, args=(connection,), name="pdhub tcp target", daemon=True
                )
                connection.thread.start()

    def _run(self, connection: Connection) -> None:
        landing: Landing | None = None
        try:
            tune(connection.sock, self._buffer_bytes)
            limit(connection.sock, socket.SO_RCVTIMEO, self._timeout_s)
            limit(connection.sock, socket.SO_SNDTIMEO, self._timeout_s)
            landing = self._admit(connection)
            if landing is not None:
                limit(connection.sock, socket.SO_RCVTIMEO, 0)  # a granted writer may compute for long between writes
                self._receive(connection, landing.region)
        except StreamEnded as end:
            log.debug("tcp: writer left: %s", end)
        except OSError as error:
            log.warning("tcp: connection failed: %s", error)
        finally:
            connection.sock.close()
            with self._lock:
                self._connections.discard(connection)
            if landing is not None:
                self._left(connection, landing)

    def _admit(self, connection: Connection) -> Landing | None:
        magic, protocol, purpose, token = HELLO.unpack(receive(connection.sock, HELLO.size))
        if magic != MAGIC or protocol != PROTOCOL:
            send(connection.sock, ANSWER.pack(Status.PROTOCOL, PROTOCOL))
            return None
        if purpose == Purpose.PING:
            send(connection.sock, ANSWER.pack(Status.OK, 0))
            return None
        with self._lock:
            landing = self._tokens.get(token)
            before = []
            if landing is not None:
                # The same grant again: what the earlier connection still brings must not land after this one's bytes.
                before = [other for other in landing.connections if other.token == token]
                connection.token = token
                landing.connections.add(connection)
        if landing is None or not self._stop(before, self._timeout_s):
            send(connection.sock, ANSWER.pack(Status.UNKNOWN_GRANT, 0))
            if landing is not None:
                self._left(connection, landing)
            return None
        send(connection.sock, ANSWER.pack(Status.OK, landing.region.nbytes))
        return landing

    def _left(self, connection: Connection, landing: Landing) -> None:
        with self._lock:
            landing.connections.discard(connection)
            then = None if landing.connections else landing.then
            if then is not None:
                landing.then = None
        if then is not None:
            then()

    def _receive(self, connection: Connection, region: Region) -> None:
        assert region.view is not None
        header = memoryview(bytearray(FRAME.size))
        while not connection.stopping:
            receive_into(connection.sock, header)
            kind, offset, length = FRAME.unpack(header)
            if kind == Kind.END:
                send(connection.sock, ACK.pack(offset))
            elif kind != Kind.DATA or offset + length > region.nbytes:
                raise StreamEnded(f"writer broke the protocol: kind {kind}, {length} bytes at {offset}")
            else:
                end = offset + length
                while offset < end and not connection.stopping:
                    stop = min(offset + PIECE, end)
                    with region.view[offset:stop] as piece:
                        receive_into(connection.sock, piece)
                    offset = stop
