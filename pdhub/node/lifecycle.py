"""A server's life in a process of its own: signals, drain, and the exit status that asks for a new process."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Final, Protocol

log = logging.getLogger("pdhub.node")

EXIT_RESTART: Final = 75
"""Status of a process that must be replaced (EX_TEMPFAIL): a landing could not be fenced, or a stream not ended."""

RESTART_DRAIN_S: Final = 10.0
"""A process that must be replaced holds memory that nobody may use: it does not wait long for the others."""


class Server(Protocol):
    """What a node and a prefill instance have in common."""

    async def start(self) -> None: ...

    async def drain(self, timeout_s: float) -> object: ...

    async def close(self) -> None: ...


async def serve(server: Server, drain_s: float, restart: asyncio.Event | None = None) -> int:
    """Start, serve until SIGTERM, SIGINT or ``restart``, drain, close.

    A second signal cuts the drain short.

    Args:
        drain_s: seconds that running requests get.
        restart: set by the server when its process must be replaced.

    Returns:
        0, or :data:`EXIT_RESTART`.
    """
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()
    restart = restart or asyncio.Event()

    def signalled(number: int) -> None:
        log.info("%s: %s", signal.Signals(number).name, "closing now" if stop.is_set() else "draining")
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    try:
        if await _first(server.start(), stop.wait()):
            await _first(stop.wait(), restart.wait())
            seconds = drain_s if not restart.is_set() else min(drain_s, RESTART_DRAIN_S)
            await _first(server.drain(seconds), hurry.wait())
    finally:
        await server.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    return EXIT_RESTART if restart.is_set() else 0


async def _first(wanted: object, other: object) -> bool:
    """Run two coroutines until one ends and cancel the other. True if the first did; its error is raised."""
    tasks = [asyncio.ensure_future(wanted), asyncio.ensure_future(other)]  # type: ignore[call-overload]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if tasks[0].cancelled():
        return False
    tasks[0].result()
    return True
