"""Whose turn it is to compute: first come, first served, one at a time."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """A fair lock whose holder may step back for a while: it comes before those who never had a turn."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def taken(self) -> bool:
        return self._taken

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def take(self, *, again: bool = False) -> None:
        """Wait for the turn. ``again``: the caller stepped back and goes on. Safe to cancel."""
        if not self._taken:
            self._taken = True
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if again else self._waiting.append)(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine in self._waiting:
                self._waiting.remove(mine)
            elif not mine.cancelled():  # cancelled in the moment in which it was our turn
                self.give()
            raise

    def give(self) -> None:
        """End the turn."""
        while self._waiting:
            following = self._waiting.popleft()
            if not following.done():
                following.set_result(None)
                return
        self._taken = False
