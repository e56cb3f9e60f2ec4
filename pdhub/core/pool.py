"""A node's two counters: landings (memory for KV on its way) and slots (requests that decode).

They are counted apart on purpose: a landing is taken at the claim, a slot only when the KV is complete and decode
asks for it, so a node with one slot receives the next request's KV while it decodes the current one.
"""

from __future__ import annotations


class Landings:
    """How many landings are taken."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a node needs at least one landing, not {capacity}")
        self.capacity = capacity
        self.taken = 0

    @property
    def free(self) -> int:
        return self.capacity - self.taken

    def take(self) -> None:
        """Raises RuntimeError if none is free: the caller must have looked."""
        if self.taken >= self.capacity:
            raise RuntimeError("no landing is free")
        self.taken += 1

    def give_back(self) -> None:
        """Raises RuntimeError if none is taken: something was freed twice."""
        if self.taken <= 0:
            raise RuntimeError("a landing was freed twice")
        self.taken -= 1


class SlotQueue:
    """Who decodes, and who waits for it: first come, first served.

    Keys are transfer ids. All methods are idempotent.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"an engine needs at least one slot, not {total}")
        self.total = total
        self._held: set[str] = set()
        self._waiting: dict[str, None] = {}

    @property
    def free(self) -> int:
        return self.total - len(self._held)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ask(self, key: str) -> bool:
        """Take a slot, or stand in line for one. True if ``key`` holds one now."""
        if key in self._held:
            return True
        if self.free and not self._waiting:
            self._held.add(key)
            return True
        self._waiting.setdefault(key)
        return False

    def give_back(self, key: str) -> list[str]:
        """Give a slot back or leave the line; the keys that hold a slot because of it."""
        self._waiting.pop(key, None)
        self._held.discard(key)
        granted: list[str] = []
        while self.free and self._waiting:
            first = next(iter(self._waiting))
            del self._waiting[first]
            self._held.add(first)
            granted.append(first)
        return granted
