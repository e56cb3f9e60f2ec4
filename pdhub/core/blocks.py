"""Which prompt blocks one cache holds, by digests that the router makes of token ids itself.

Engines name blocks as they like. Here a block's digest follows from its tokens and the digest of the block before it,
so that the same beginning has the same digests in every cache with blocks of that size.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from itertools import takewhile
from typing import Final

from pdhub.api.cache import BlocksRemoved, BlocksStored, CacheEvent, CacheReset

ROOT: Final = 0
MAX_BLOCKS: Final = 1 << 18
"""Blocks remembered a cache, about 60 MB; of 16 tokens each they are four million tokens."""


def chain(token_ids: Sequence[int], block_tokens: int, parent: int = ROOT) -> list[int]:
    """A digest for each full block; equal only within one process, whose hash key they depend on."""
    ids, digests = array("q", token_ids), []
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        parent = hash((parent, ids[start : start + block_tokens].tobytes()))
        digests.append(parent)
    return digests


class BlockIndex:
    """One cache, as its events tell.

    Args:
        limit: blocks remembered; beyond it the oldest are forgotten, and absence says nothing any more.
    """

    def __init__(self, limit: int = MAX_BLOCKS) -> None:
        self._limit = limit
        self._names: dict[Hashable, int] = {}
        self._held: dict[int, int] = {}
        self.complete = False
        self.block_tokens = 0

    def __len__(self) -> int:
        return len(self._names)

    def apply(self, events: Iterable[CacheEvent]) -> None:
        """Events in order."""
        for event in events:
            match event:
                case BlocksStored():
                    self._store(event)
                case BlocksRemoved():
                    for name in event.names:
                        self._forget(name)
                case CacheReset():
                    self._names.clear()
                    self._held.clear()
                    self.complete = event.empty

    def depth(self, digests: Iterable[int]) -> int:
        """How many of them, from the first on, are held without a gap. What comes after a gap cannot be used."""
        return sum(1 for _ in takewhile(self._held.__contains__, digests))

    def _store(self, event: BlocksStored) -> None:
        parent = ROOT if event.parent is None else self._names.get(event.parent)
        size = event.block_tokens
        if parent is None or size < 1 or len(event.token_ids) != size * len(event.names):
            return  # what it continues is not known: its place in a prompt is not either
        self.block_tokens = size
        for name, digest in zip(event.names, chain(event.token_ids, size, parent), strict=True):
            if name not in self._names:
                self._names[name] = digest
                self._held[digest] = self._held.get(digest, 0) + 1
        while len(self._names) > self._limit:
            self._forget(next(iter(self._names)))
            self.complete = False

    def _forget(self, name: Hashable) -> None:
        digest = self._names.pop(name, None)
        if digest is None:
            return
        self._held[digest] -= 1
        if not self._held[digest]:
            del self._held[digest]
