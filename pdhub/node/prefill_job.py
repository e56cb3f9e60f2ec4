"""One request of the prefill leg: what stops it, from whichever side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pdhub.api.errors import RequestError
from pdhub.sender import Session

T = TypeVar("T")


class Job:
    """Lives on the event loop; :meth:`stop_soon` may be called from any thread.

    Args:
        leave: ends a session in a thread, because that waits for aborts.
    """

    def __init__(self, leave: Callable[[Session, str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._leave = leave
        self._stopped: asyncio.Future[RequestError] = self._loop.create_future()
        self._session: Session | None = None

    @property
    def session(self) -> Session | None:
        return self._session

    def stop(self, error: RequestError) -> None:
        """Compute no further chunk, send nothing more. The first reason stays. Idempotent."""
        if not self._stopped.done():
            self._stopped.set_result(error)
        if self._session is not None:
            self._leave(self._session, error.message)

    def stop_soon(self, error: RequestError) -> None:
        """:meth:`stop` from another thread."""
        try:
            self._loop.call_soon_threadsafe(self.stop, error)
        except RuntimeError:
            return  # the loop is closed, and the job with it

    def check(self) -> None:
        """Raises why the job was stopped, if it was."""
        if self._stopped.done():
            raise self._stopped.result()

    async def until(self, work: Awaitable[T]) -> T:
        """The result of ``work``, or raises as soon as the job is stopped; ``work`` is cancelled then."""
        task = asyncio.ensure_future(work)
        both: set[asyncio.Future[Any]] = {task, self._stopped}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            self.check()
        return task.result()

    async def join(self, joined: Future[Session], timeout_s: float) -> Session:
        """Take the session that a join gives; give it back if the job ends meanwhile."""
        try:
            async with asyncio.timeout(timeout_s):
                session = await self.until(asyncio.wrap_future(joined))
        except BaseException:
            if not joined.cancel():
                joined.add_done_callback(self._unwanted)
            raise
        self._session = session
        if self._stopped.done():
            self._leave(session, self._stopped.result().message)
        self.check()
        return session

    def _unwanted(self, joined: Future[Session]) -> None:
        if not joined.cancelled() and joined.exception() is None:
            self._leave(joined.result(), "nobody waits for this landing any more")
