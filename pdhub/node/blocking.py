"""Blocking calls beside the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T], name: str) -> T:
    """Run ``call`` in a daemon thread of its own and return what it returns or raise what it raises.

    Not in a pool: a fence that hangs must neither hold up other calls nor keep the process from exiting.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        value: T | None = None
        failed: BaseException | None = None
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 - handed to the one who awaits
            failed = error
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(settle, value, failed)
            except RuntimeError:
                return  # the loop closed in between: nobody waits any more

    threading.Thread(target=work, name=name, daemon=True).start()
    return await done
