"""Which beginnings of prompts were sent before, so that a prefix cache may hold them. Approximate, bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

ENTRIES: Final = 65_536
"""Digests remembered, the latest used; about 120 bytes each."""


class Prefixes:
    """Args:
    entries: digests remembered.
    """

    __slots__ = ("_entries", "_seen")

    def __init__(self, entries: int = ENTRIES) -> None:
        self._entries = entries
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def share(self, prefix: Sequence[int]) -> float:
        """The part of a prompt that was sent before, 0 to 1.

        Args:
            prefix: digests of its beginnings, shortest first; not empty.
        """
        low, high = 0, len(prefix)
        while low < high:  # whose longer beginning is known, the shorter ones are, or as good as
            middle = (low + high + 1) // 2
            if prefix[middle - 1] in self._seen:
                low = middle
            else:
                high = middle - 1
        return low / len(prefix)

    def add(self, prefix: Sequence[int]) -> None:
        """It was sent. The shortest beginnings end up as the latest used: many prompts share them."""
        seen = self._seen
        for digest in reversed(prefix):
            if digest in seen:
                seen.move_to_end(digest)
            else:
                seen[digest] = None
        while len(seen) > self._entries:
            seen.popitem(last=False)
