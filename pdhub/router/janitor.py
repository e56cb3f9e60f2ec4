"""Work that must happen after a request is gone, such as telling a node to drop what it holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pdhub.api.errors import PDHubError

log = logging.getLogger("pdhub.router.janitor")

ATTEMPT_S = 2.0
PAUSES_S = (0.1, 0.5, 2.0)


class Janitor:
    """Background tasks that no cancelled request can take with it. Bounded in time, so :meth:`close` ends.

    Args:
        count: told ``sent`` or ``failed`` for every cancel call.
    """

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(
        self, send: Callable[[], Awaitable[None]], after: asyncio.Future[Any] | None = None
    ) -> asyncio.Task[None]:
        """Send a cancel call until it is taken or the attempts are used up.

        Args:
            send: one attempt; idempotent at the node.
            after: a claim that may still be under way: cancelling first would leave it behind.
        """
        return self._spawn(self._cancel(send, after))

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it in the background; it reports its own failures."""
        self._spawn(work)

    async def close(self, within_s: float = 5.0) -> None:
        """Wait for what is under way; what is not done after ``within_s`` seconds is given up."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _cancel(self, send: Callable[[], Awaitable[None]], after: asyncio.Future[Any] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
            if not after.cancelled():
                after.exception()  # seen; the claim's failure was already reported or nobody waits for it
        for pause in (*PAUSES_S, None):
            try:
                async with asyncio.timeout(ATTEMPT_S):
                    await send()
                self._count("sent")
                return
            except (PDHubError, TimeoutError) as error:
                if pause is None:
                    log.warning("a cancel call was not taken, the lease will expire by itself: %s", error)
                    self._count("failed")
                    return
            await asyncio.sleep(pause)
