"""How many hand-overs one prefill instance has under way, where its connector bears only so many."""

from __future__ import annotations

import asyncio
from collections import deque


class Handovers:
    """First come, first served. A place may be given back later than it was left: the instance goes on for a while with
    a hand-over that nobody wants any more."""

    def __init__(self) -> None:
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken(self) -> int:
        """Places that are not free."""
        return self._taken

    async def enter(self, limit: int, within_s: float) -> None:
        """Wait for a place. Pair with :meth:`leave`.

        Args:
            limit: places that there are, as the caller sees it.

        Raises:
            TimeoutError: none within ``within_s``.
        """
        if self._taken < limit and not self._waiting:
            self._taken += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((limit, place))
        try:
            async with asyncio.timeout(within_s):
                await place
        except BaseException:
            if place.done() and not place.cancelled():  # it came at the very moment when nobody wanted it any more
                self._free()
            else:
                place.cancel()
                self._serve()
            raise

    def leave(self, after_s: float = 0.0) -> None:
        """Give the place back, after so many seconds."""
        if after_s > 0:
            asyncio.get_running_loop().call_later(after_s, self._free)
        else:
            self._free()

    def _free(self) -> None:
        self._taken -= 1
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            limit, place = self._waiting[0]
            if not place.done():
                if self._taken >= limit:
                    return
                self._taken += 1
                place.set_result(None)
            self._waiting.popleft()
