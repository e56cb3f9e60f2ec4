"""Tell somebody slow what happened, and make no request wait: observers of ended requests, the decision log."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger("pdhub.telemetry")

T = TypeVar("T")


class Observer(Generic[T]):
    """A bounded queue and one worker thread.

    Args:
        notify: called in the worker for every record, such as ``Registry.request_finished``.
        limit: records that may wait; more are dropped and counted.
    """

    def __init__(self, notify: Callable[[T], None], limit: int = 1024) -> None:
        self._notify = notify
        self._queue: queue.Queue[T | None] = queue.Queue(maxsize=limit)
        self._closed = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="pdhub-observer", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records that no observer saw, because the queue was full or closed."""
        return self._dropped

    def offer(self, record: T) -> bool:
        """Hand over one record; never blocks. False if it was dropped."""
        try:
            if self._closed:
                raise queue.Full
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1
            return False
        return True

    def close(self, timeout_s: float = 5.0) -> bool:
        """Deliver what waits, then stop. Idempotent.

        Returns:
            False if an observer still blocks after ``timeout_s``; its thread dies with the process.
        """
        if not self._closed:
            self._closed = True
            try:
                self._queue.put(None, timeout=timeout_s)
            except queue.Full:
                return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._notify(record)
            except Exception:
                log.exception("an observer failed on request %s", getattr(record, "id", "?"))
