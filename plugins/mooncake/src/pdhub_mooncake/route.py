"""The way from one engine to another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from pdhub.api import TransferFailed
from pdhub.onesided import Piece, Route, Sending, StillUnderWay
from pdhub_mooncake.codes import meaning

AT_ONCE = 64
"""Requests of one batch that the engine has at a time: it queues a thousand a peer and fails those beyond."""

ATTEMPTS = 3
"""A connection of the engine that broke, such as by the fence of another landing, fails whatever waits for it next."""

_DONE, _RUNNING, _TIMED_OUT = 1, 0, -2


class MooncakeSending(Sending):
    """A batch, request by request: a batch of the engine's own fails as a whole when it is large, and its state can
    be asked for only by waiting. A request that failed is repeated: the same bytes, to the same place."""

    def __init__(self, engine: Any, session: str, pieces: Sequence[Piece]) -> None:
        self._engine = engine
        self._session = session
        self._waiting = deque((piece, 1) for piece in pieces)
        self._running: list[tuple[int, Piece, int]] = []
        self._failed = ""
        self._start()

    def poll(self) -> bool:
        still: list[tuple[int, Piece, int]] = []
        for number, piece, attempt in self._running:
            status = self._engine.transfer_check_status(number)
            if status == _RUNNING:
                still.append((number, piece, attempt))
            elif status == _TIMED_OUT:
                raise StillUnderWay("Mooncake gave up waiting for the target")
            elif status != _DONE:
                self._broke(piece, attempt, f"the write failed: {meaning(status)}")
        self._running = still
        self._start()
        if self._running or (self._waiting and not self._failed):
            return False
        if self._failed:
            raise TransferFailed(f"Mooncake: {self._failed}")
        return True

    def stop(self) -> None:
        self._failed = self._failed or "nobody wants it any more"

    def _broke(self, piece: Piece, attempt: int, why: str) -> None:
        self.unproven = True
        if attempt < ATTEMPTS and not self._failed:
            self._waiting.append((piece, attempt + 1))
        else:
            self._failed = self._failed or why

    def _start(self) -> None:
        for _ in range(len(self._waiting)):
            if self._failed or len(self._running) >= AT_ONCE:
                return
            piece, attempt = self._waiting.popleft()
            number = self._engine.transfer_submit_write(self._session, piece.source, piece.target, piece.nbytes)
            if number:
                self._running.append((number, piece, attempt))
            else:
                self._broke(piece, attempt, "the target's engine cannot be reached")


class MooncakeRoute(Route):
    """See :class:`pdhub.onesided.Route`. The engine keeps its connections itself, and drops none on demand."""

    def __init__(self, engine: Any, session: str) -> None:
        self._engine = engine
        self._session = session

    def learn(self, memory: bytes) -> None:
        return None

    def post(self, pieces: Sequence[Piece]) -> Sending:
        return MooncakeSending(self._engine, self._session, pieces)

    def close(self) -> None:
        return None
