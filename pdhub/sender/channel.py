"""One control connection to one node: dials, says hello, then sleeps in ``recv`` in a thread of its own.

Everything that may block on a node happens in that node's thread, so that a stopped node delays no other.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable
from typing import Protocol

from pdhub.api.errors import RequestError, TransferFailed
from pdhub.api.transport import PeerMetadata
from pdhub.sender.errors import refusal
from pdhub.wire.control import (
    PROTOCOL,
    Accept,
    ControlMessage,
    Decoder,
    FrameError,
    Hello,
    Join,
    Leave,
    Refused,
    Revoke,
    Welcome,
    encode,
)

log = logging.getLogger("pdhub.sender")

SEND_TIMEOUT_S = 5
"""A control message is small; a node that does not take one in this time is lost."""


class Writer(Protocol):
    """What the channel tells one writer. Called in the channel's thread, never under its lock."""

    join: Join

    def accepted(self, accept: Accept, metadata: PeerMetadata) -> bool:
        """The landing is ours. False: nobody wants it any more; the channel leaves it."""

    def refused(self, error: RequestError) -> None:
        """The join failed."""

    def revoked_by_node(self, reason: str) -> None:
        """The node took the landing back."""

    def lost(self, error: RequestError) -> None:
        """The connection ended; the node counts this writer as vanished."""


class Channel:
    """See the module's text. ``on_closed`` is called once, when no writer can use it any more."""

    def __init__(
        self, host: str, port: int, hello: Hello, *, connect_timeout_s: float, on_closed: Callable[[Channel], None]
    ) -> None:
        self.host, self.port = host, port
        self._hello = hello
        self._connect_timeout_s = connect_timeout_s
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._sock: socket.socket | None = None
        self._metadata: PeerMetadata | None = None
        self._writers: dict[str, Writer] = {}
        self._joined: set[str] = set()
        self._error: RequestError | None = None
        self._thread = threading.Thread(target=self._run, name=f"pdhub-control-{host}:{port}", daemon=True)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def enter(self, writer: Writer) -> bool:
        """Send the writer's join, now or when the node said welcome. False if the channel is closed already."""
        with self._lock:
            if self._error is not None:
                return False
            key = writer.join.transfer_id
            if key in self._writers:
                raise TransferFailed(f"this sender already writes transfer {key!r}")
            self._writers[key] = writer
            ready = self._metadata is not None
        if ready:
            self._try_send(writer.join)
        return True

    def drop(self, writer: Writer) -> None:
        """The writer is finished: nothing is said to it any more."""
        with self._lock:
            if self._writers.get(writer.join.transfer_id) is writer:
                del self._writers[writer.join.transfer_id]
                self._joined.discard(writer.join.transfer_id)

    def send(self, message: ControlMessage) -> None:
        """Send one message. Raises TransferFailed; the connection is gone then."""
        sock = self._sock
        if sock is None or self._error is not None:
            raise TransferFailed("the control connection to the node is closed")
        try:
            with self._sending:
                sock.sendall(encode(message))
        except OSError as error:
            # half a frame may be out, so the connection is of no use; the reader sees the end and cleans up
            _shut(sock)
            raise TransferFailed("the control connection to the node failed") from error

    def close(self) -> None:
        """Close and wait for the thread. Writers are told that it is lost. Idempotent."""
        self._end(TransferFailed("the sender was closed"))
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _try_send(self, message: ControlMessage) -> None:
        try:
            self.send(message)
        except TransferFailed as error:
            log.debug("%s:%s: %s", self.host, self.port, error.message)

    def _run(self) -> None:
        try:
            self._serve()
        except FrameError as error:
            log.warning("control channel %s:%s: %s", self.host, self.port, error)
            self._end(TransferFailed("the node does not speak the control protocol"))
        except OSError as error:
            log.info("control channel %s:%s: %s", self.host, self.port, error)
            self._end(TransferFailed("the control connection to the node failed"))
        except RequestError as error:
            self._end(error)
        finally:
            with self._lock:
                sock, self._sock = self._sock, None
            if sock is not None:
                sock.close()

    def _serve(self) -> None:
        sock = socket.create_connection((self.host, self.port), timeout=self._connect_timeout_s)
        with self._lock:
            self._sock = sock
            if self._error is not None:  # closed while dialling
                return
        _tune(sock)
        sock.sendall(encode(self._hello))
        decoder = Decoder()
        while True:
            data = sock.recv(1 << 16)
            if not data:
                raise TransferFailed("the node closed the control connection")
            for message in decoder.feed(data):
                if self._metadata is None:
                    metadata = self._welcome(message)
                    sock.settimeout(None)
                    seconds = struct.pack("@ll", SEND_TIMEOUT_S, 0)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
                    self._join_waiting(metadata)
                else:
                    self._dispatch(message, self._metadata)

    def _welcome(self, message: ControlMessage) -> PeerMetadata:
        if isinstance(message, Refused):
            raise refusal(message, 0)
        if not isinstance(message, Welcome):
            raise FrameError(f"expected a welcome, got {type(message).__name__}")
        if message.transport != self._hello.transport:
            raise TransferFailed(
                f"the node's transport is {message.transport!r}, this sender's {self._hello.transport!r}"
            )
        return PeerMetadata(message.transport, message.metadata)

    def _join_waiting(self, metadata: PeerMetadata) -> None:
        with self._lock:  # at once, so that a join is sent either here or by enter()
            self._metadata = metadata
            waiting = list(self._writers.values())
        for writer in waiting:
            self._try_send(writer.join)

    def _dispatch(self, message: ControlMessage, metadata: PeerMetadata) -> None:
        match message:
            case Accept():
                self._accepted(message, metadata)
            case Refused():
                with self._lock:
                    known = message.transfer_id not in self._joined
                    writer = self._writers.pop(message.transfer_id, None) if known else None
                if writer is not None:
                    writer.refused(refusal(message, writer.join.tokens))
            case Revoke():
                with self._lock:
                    writer = self._writers.get(message.transfer_id)
                if writer is not None and writer.join.generation == message.generation:
                    writer.revoked_by_node(message.reason)
            case _:
                raise FrameError(f"unexpected {type(message).__name__} from a node")

    def _accepted(self, accept: Accept, metadata: PeerMetadata) -> None:
        with self._lock:
            writer = self._writers.get(accept.transfer_id)
            fits = writer is not None and writer.join.generation == accept.generation
            if fits:
                self._joined.add(accept.transfer_id)
        if writer is None or not fits:
            log.warning("accept for transfer %s that nobody waits for", accept.transfer_id)
            return
        if not writer.accepted(accept, metadata):
            self.drop(writer)
            reason = "nobody waits for this landing any more"
            self._try_send(Leave(accept.transfer_id, accept.generation, writer.join.rank, reason, stopped=True))

    def _end(self, error: RequestError) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            writers = list(self._writers.values())
            joined = set(self._joined)
            self._writers.clear()
            self._joined.clear()
            sock = self._sock
        if sock is not None:
            _shut(sock)
        self._on_closed(self)
        for writer in writers:
            if writer.join.transfer_id in joined:
                writer.lost(error)
            else:
                writer.refused(error)


def hello(sender: str, version: str, transport: str, fingerprint: str) -> Hello:
    """This sender's first frame."""
    return Hello(PROTOCOL, version, sender, transport, fingerprint)


def _tune(sock: socket.socket) -> None:
    """Small frames leave at once; a host that vanished without a word is noticed in about ten seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # not connected any more
