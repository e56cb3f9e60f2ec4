"""What an engine tells about its prefix cache: which blocks of which prompts it holds.

An engine that publishes this lets the router send a prompt where its beginning really is, instead of where it was sent
some time ago.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks that follow one another in a prompt are in the cache. Told twice, it means the same.

    Args:
        names: what the engine calls them, in the prompt's order. Two prompts with the same beginning share names.
        parent: name of the block before the first; None = the first begins the prompt.
        token_ids: of all of them, ``len(names) * block_tokens`` ids.
    """

    names: tuple[Hashable, ...]
    parent: Hashable | None
    token_ids: tuple[int, ...]
    block_tokens: int


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """They are not in the cache any more. Names that were never told mean nothing."""

    names: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class CacheReset:
    """Everything told before is void.

    Args:
        empty: the cache is empty now, so that what follows is all of it. False: events were lost, and what follows is
            only a part.
    """

    empty: bool


CacheEvent = BlocksStored | BlocksRemoved | CacheReset


class CacheFeed(ABC):
    """One source of cache events of one endpoint. The host runs it on its loop and owns what is learned from it.

    The exception to the rule that engine clients open nothing: such events come over protocols that the host does not
    speak. It connects to nothing but the address in the engine's options.
    """

    @abstractmethod
    async def run(self, told: Callable[[Sequence[CacheEvent]], None]) -> None:
        """Listen until cancelled; ends nothing else when it raises, and is run again some time later.

        Args:
            told: takes events in order. Before the first :class:`CacheReset` everything is partial.
        """
