"""Blocking sockets with kernel time limits: one system call moves megabytes without holding the interpreter."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque


class StreamEnded(Exception):
    """The other side closed the connection, or it broke, or made no progress in time."""


def tune(sock: socket.socket, buffer_bytes: int) -> None:
    """No delay for small frames. Buffers stay small enough for the processor's cache: what waits in a larger one has
    left it by the time that it is read, and that halves the speed between processes of one host."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


def limit(sock: socket.socket, option: int, seconds: float) -> None:
    """Longest time that one blocking call may take (``SO_RCVTIMEO`` or ``SO_SNDTIMEO``); 0 for ever."""
    whole = int(seconds)
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, int((seconds - whole) * 1e6)))


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill ``view``. Raises StreamEnded."""
    got = 0
    while got < len(view):
        try:
            count = sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
        except OSError as error:
            raise StreamEnded(str(error)) from error
        if count == 0:
            raise StreamEnded("closed by the other side")
        got += count


def receive(sock: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes, all within the socket's time limit: dripping single bytes gains a stranger nothing.
    Raises StreamEnded."""
    try:
        data = sock.recv(count, socket.MSG_WAITALL)
    except OSError as error:
        raise StreamEnded(str(error)) from error
    if len(data) < count:
        raise StreamEnded("closed by the other side, or too slow")
    return data


def send(sock: socket.socket, *parts: bytes | memoryview) -> None:
    """All of ``parts``, in order, without joining them. Raises StreamEnded."""
    views = deque(memoryview(part) for part in parts if len(part))
    while views:
        try:
            sent = sock.sendmsg(views, [], socket.MSG_NOSIGNAL)
        except OSError as error:
            raise StreamEnded(str(error)) from error
        while views and sent >= len(views[0]):
            sent -= len(views.popleft())
        if sent:
            views[0] = views[0][sent:]


def shut(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Wake whoever blocks on it. Harmless on a dead socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(how)
