"""Ctrl-C, SIGTERM and SIGHUP: the first asks for an orderly stop, a second kills."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """A context manager inside a running loop of the main thread.

    Args:
        on_second: called for every further signal.
    """

    def __init__(self, on_second: Callable[[], None]) -> None:
        self._on_second = on_second
        self._first: asyncio.Event = asyncio.Event()
        self.name = ""

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in _WATCHED:
            loop.add_signal_handler(number, self._got, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in _WATCHED:
            loop.remove_signal_handler(number)

    def _got(self, number: signal.Signals) -> None:
        if self._first.is_set():
            self._on_second()
        self.name = self.name or number.name
        self._first.set()

    async def wait(self) -> str:
        """The name of the first signal."""
        await self._first.wait()
        return self.name
