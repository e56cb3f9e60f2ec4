"""A write that is held half way, in the middle of its copy: there a process stands that is stopped while it writes.

What it copies when it goes on is what a landing must be protected from: no check of the writer comes in between.
"""

from __future__ import annotations

import ctypes
import random
import socket
import time
from types import SimpleNamespace

from safety_board import LOOK_S, Board, Gate

from pdhub.transports import shm_writer, tcp_channel

SHARE = 0.5


def hold_half_way(board: Board, rng: random.Random) -> None:
    """From now on in this process, while writes are held: a share of those that do run stop half way."""
    whole = tcp_channel.send

    def wait() -> None:
        while board.is_shut(Gate.WRITE):
            time.sleep(LOOK_S)

    def chosen() -> bool:
        return board.is_shut(Gate.WRITE) and rng.random() < SHARE

    def memmove(target: int, source: int, count: int) -> None:
        half = count // 2 if chosen() else count
        ctypes.memmove(target, source, half)
        if half < count:
            wait()
            ctypes.memmove(target + half, source + half, count - half)

    def send(sock: socket.socket, *parts: bytes | memoryview) -> None:
        if not chosen():
            whole(sock, *parts)
            return
        data = b"".join(parts)
        whole(sock, data[: len(data) // 2])
        wait()
        whole(sock, data[len(data) // 2 :])

    shm_writer.ctypes = SimpleNamespace(memmove=memmove)  # type: ignore[attr-defined]
    tcp_channel.send = send  # type: ignore[attr-defined]
