"""Staging memory: a few slots of one chunk each, shared by all sessions of a sender."""

from __future__ import annotations

import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from pdhub.api.errors import ConfigError
from pdhub.api.transport import Region, Transport

MIN_SLOTS = 2
"""One is written while the next one fills."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot and who holds it."""

    index: int
    region: Region
    target: Hashable


def slot_count(staging_bytes: int, slot_bytes: int, most: int) -> int:
    """How many slots fit. Raises ConfigError if two do not."""
    count = min(most, staging_bytes // max(1, slot_bytes))
    if count < MIN_SLOTS:
        raise ConfigError(
            f"{staging_bytes} bytes of staging do not hold two chunks of {slot_bytes} bytes",
            where="handoff.staging_bytes",
            hint=f"set it to at least {MIN_SLOTS * slot_bytes}, or make the engine's chunks smaller",
        )
    return count


Memory = Callable[[str, int], Region]
"""Makes one slot's memory, given an id and bytes. What it returns is registered with the transport."""


def host_memory(region_id: str, nbytes: int) -> Region:
    """Pages of this process."""
    memory = mmap.mmap(-1, nbytes)
    address = int(np.frombuffer(memory, np.uint8).ctypes.data)
    return Region(region_id, address, nbytes, "cpu", memoryview(memory), memory)


class Staging:
    """Slots of memory, registered with the transport.

    A target may take another slot only while more are free than it holds. So a stalled target keeps at most half
    of them, a second one half of the rest, and a lively one always finds a slot.

    Args:
        memory: default: host memory.
        on_free: called after a slot came back, from any thread; must not block.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        slot_bytes: int,
        slots: int,
        *,
        memory: Memory | None = None,
        on_free: Callable[[], None] | None = None,
    ) -> None:
        self._transport = transport
        self._memory = memory or host_memory
        self._on_free = on_free
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._regions = [self._make(f"staging-{name}-{i}") for i in range(slots)]
        self._free = list(range(slots))
        self._held: Counter[Hashable] = Counter()
        self._changed = threading.Condition()
        self._closed = False

    def _make(self, region_id: str) -> Region:
        return self._transport.register(self._memory(region_id, self.slot_bytes))

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        with self._changed:
            return len(self._free)

    def take(self, target: Hashable, deadline: float, ended: Callable[[], bool]) -> Slot | None:
        """Wait for a slot. None if ``deadline`` (monotonic) passed, or ``ended`` says so after a :meth:`wake`."""
        with self._changed:
            while not self._closed and not ended():
                if len(self._free) > self._held[target]:
                    self._held[target] += 1
                    index = self._free.pop()
                    return Slot(index, self._regions[index], target)
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            return None

    def release(self, slot: Slot) -> None:
        """Give a slot back; nothing reads it any more."""
        with self._changed:
            self._free.append(slot.index)
            self._held[slot.target] -= 1
            if not self._held[slot.target]:
                del self._held[slot.target]
            self._changed.notify_all()
        if self._on_free is not None:
            self._on_free()

    def wake(self) -> None:
        """Make waiters look at their ``ended`` again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Forget the slots that are free. One that a write may still read stays mapped as long as that write."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            free = [self._regions[index] for index in self._free]
        for region in free:
            self._transport.unregister(region.id)
