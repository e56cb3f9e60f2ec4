"""KV that only the end of a lease frees: prefill computed it, and nobody fetches it any more.

It takes room from other prompts at the prefill instance until then, and no engine says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from pdhub.api.client import EngineClient, Freed, LegOrder
from pdhub.api.errors import EngineFailed, LeaseExpired, TransferFailed

MOVED_WITHIN_S = 5.0
"""A decode leg that began together with its prefill has fetched the KV when it has run for so long."""

NEAR_S = 3.0
"""An instance says that a lease has ended about then: it counts from a moment of its own, and is asked now and then."""

REMEMBERED = 1000

_UNFETCHED = (EngineFailed, TransferFailed, LeaseExpired)


def stays(client: EngineClient, order: LegOrder, error: BaseException | None, *, asked: bool, waited_s: float) -> bool:
    """Does the KV of an attempt that ended before its answer began wait for its lease?

    Args:
        error: what ended it. asked: decode was sent the request. waited_s: since prefill answered.

    A decode node that refuses the request, or whose client leaves, lets go of the KV by itself; one that is dead or
    failed to load it does not. Where both legs ran at once it may or may not have fetched it: then it counts.
    """
    if client.freed is not Freed.LEASE:
        return False
    if not asked or isinstance(error, _UNFETCHED):
        return True
    return order is LegOrder.TOGETHER and waited_s < MOVED_WITHIN_S


class Leftovers:
    """By prefill instance, from the moment that it is known until the lease ends.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str, deque[float]] = {}
        self._past: dict[str, deque[float]] = {}

    def add(self, prefill: str, until: float) -> None:
        """One hand-over. ``until``: when its lease ends, if nobody has renewed it."""
        self._until.setdefault(prefill, deque()).append(until)
        self._forget(prefill)

    def held(self) -> Iterator[tuple[str, int, float]]:
        """Now: (prefill instance, hand-overs whose KV is still there, seconds until the last of them is freed)."""
        now = self._clock()
        for name, until in self._until.items():
            self._forget(name)
            yield name, len(until), max((at - now for at in until), default=0.0)

    def ended(self, prefill: str, since: float) -> int:
        """Those whose lease has ended since then, or is about to: what the instance may well have given up."""
        self._forget(prefill)
        known = (*self._past.get(prefill, ()), *self._until.get(prefill, ()))
        return sum(since - NEAR_S <= until <= self._clock() + NEAR_S for until in known)

    def _forget(self, prefill: str) -> None:
        now, until = self._clock(), self._until.get(prefill, deque())
        while until and until[0] <= now:
            self._past.setdefault(prefill, deque(maxlen=REMEMBERED)).append(until.popleft())
