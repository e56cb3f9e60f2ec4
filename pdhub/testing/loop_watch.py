"""How long the event loop was kept from running."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

TICK_S = 0.005


class LoopWatch:
    """``async with LoopWatch() as watch``: afterwards ``watch.longest_s`` is the longest time, in seconds, for which
    whatever ran inside kept a task that wakes every :data:`TICK_S` from running."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopWatch:
        self._last = time.perf_counter()
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._note()  # what stalled last was followed by no tick
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._note()

    def _note(self) -> None:
        now = time.perf_counter()
        self.longest_s = max(self.longest_s, now - self._last - TICK_S)
        self._last = now
