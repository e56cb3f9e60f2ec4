"""The target's end of the control connections: one thread that sleeps in ``select``."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading

from pdhub.api import PluginError
from pdhub.onesided.landings import Landings
from pdhub.onesided.wire import Inbox, Kind, Message

log = logging.getLogger("pdhub.onesided")


class Connection:
    """One writer."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = Inbox()
        self.knows: set[int] = set()
        self.welcome = False

    def send(self, message: Message) -> None:
        data = message.pack()
        try:
            if self.sock.send(data) == len(data):
                return
        except OSError as error:
            log.debug("a writer takes no message: %s", error)
        with contextlib.suppress(OSError):  # it was closed already
            self.sock.shutdown(socket.SHUT_RDWR)


class Server:
    """Listens for writers.

    Args:
        name: of the transport, for messages.
        host, port: to listen on; port 0 takes a free one.
        instance: what a writer must name.
        most: connections at once; more are closed.
    """

    def __init__(self, name: str, host: str, port: int, instance: bytes, most: int, landings: Landings) -> None:
        self._name = name
        self._host = host
        self._port = port
        self._instance = instance
        self._most = most
        self._landings = landings
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._closing = False

    def serve(self) -> int:
        """Start listening, once; the port. Raises PluginError if it is taken."""
        with self._lock:
            if self._listener is None:
                self._listener = self._listen()
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._thread = threading.Thread(target=self._run, name=f"pdhub {self._name} target", daemon=True)
                self._thread.start()
            port: int = self._listener.getsockname()[1]
            return port

    def close(self) -> None:
        """End every connection. Idempotent."""
        with self._lock:
            self._closing = True
            thread, self._thread = self._thread, None
        if thread is not None and self._listener is not None:
            os.eventfd_write(self._wake, 1)
            thread.join()
            os.close(self._wake)
            self._listener.close()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, self._port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise PluginError(
                f"{self._name} transport cannot listen on {self._host}:{self._port}: {error.strerror or error}",
                hint="choose another port, or 0 for a free one",
            ) from error
        listener.setblocking(False)
        return listener

    # -- the serving thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        listener = self._listener
        assert listener is not None
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._closing:
                for key, _ in selector.select():
                    if key.fileobj is listener:
                        self._accept(listener, selector)
                    elif isinstance(key.data, Connection) and not self._receive(key.data):
                        selector.unregister(key.data.sock)
                        self._end(key.data)
            for connection in list(self._connections):
                self._end(connection)

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            log.warning("%s: a writer could not connect: %s", self._name, error)
            return
        if len(self._connections) >= self._most:
            log.warning("%s: more than %d writers; one is refused", self._name, self._most)
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = Connection(sock)
        self._connections.add(connection)
        selector.register(sock, selectors.EVENT_READ, connection)

    def _receive(self, connection: Connection) -> bool:
        """What a writer sent. False: its connection is over."""
        try:
            data = connection.sock.recv(1 << 16)
            if not data:
                return False
            return all(self._handle(connection, message) for message in connection.inbox.take(data))
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            return False

    def _handle(self, connection: Connection, message: Message) -> bool:
        if message.kind is Kind.HELLO and message.token == self._instance:
            connection.welcome = True
            connection.send(Message(Kind.WELCOME, self._instance))
        elif not connection.welcome:
            return False
        elif message.kind is Kind.OPEN:
            self._landings.open(connection, message.token)
        elif message.kind in (Kind.RETURNED, Kind.LOST):
            self._landings.returned(connection, message.token, lost=message.kind is Kind.LOST)
        else:
            return False
        return True

    def _end(self, connection: Connection) -> None:
        self._connections.discard(connection)
        connection.sock.close()
        self._landings.gone(connection)
