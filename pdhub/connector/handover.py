"""One request's hand-over as a worker sees it: how much KV is there, how much of it was copied out."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pdhub.api.errors import RequestError
from pdhub.connector.steps import Advance, End, Start
from pdhub.sender import Session


@dataclass(eq=False, slots=True)
class Handover:
    """State of one request.

    Args:
        deadline: monotonic; after it the hand-over has failed.
        valid: prompt tokens whose KV is in the cache; ``table`` says where.
        floor: tokens before it may have left the cache of a sliding window.
        mark: what the copying must wait for before it reads that KV; the source's.
        copied: tokens that are in staging or further. What was copied stays good if vLLM computes it once more.
        epoch: raised when ``table`` becomes void.
    """

    start: Start
    joined: Future[Session]
    deadline: float
    table: list[list[int]] = field(default_factory=list)
    valid: int = 0
    floor: int = 0
    mark: Any = None
    copied: int = 0
    epoch: int = 0
    session: Session | None = None
    written: Future[int] | None = None
    error: RequestError | None = None
    end: End | None = None

    @property
    def tokens(self) -> int:
        return self.start.tokens

    def advance(self, advance: Advance, mark: Any) -> None:
        """A step that has computed more of the prompt is behind us."""
        if advance.fresh:
            self.table = [list(ids) for ids in advance.blocks]
        elif advance.blocks:
            for mine, more in zip(self.table, advance.blocks, strict=True):
                mine.extend(more)
        self.valid = advance.computed
        self.mark = mark

    def void(self) -> None:
        """vLLM took the blocks back."""
        self.table = []
        self.valid = 0
        self.epoch += 1

    def ready(self, align: int, most: int) -> int:
        """Where the next piece ends: a multiple of ``align`` tokens or the end of the prompt, at most ``most`` tokens
        further. ``copied`` itself if there is none yet."""
        whole = self.tokens if self.valid >= self.tokens else self.valid // align * align
        return max(self.copied, min(whole, self.copied + most))

    @property
    def drained(self) -> bool:
        """Nothing will read its blocks any more."""
        return self.error is not None or self.copied >= self.tokens or (self.end is not None and not self.end.complete)
