"""One decoding request: its state in the worker thread, and its end on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from pdhub.api import DecodeRequest, Finished, FinishReason, TokenChunk, TokenLogprob
from pdhub_transformers.attention import Feed
from pdhub_transformers.rows import Storage
from pdhub_transformers.sampling import Sampler
from pdhub_transformers.speculation import PromptLookup

Item = TokenChunk | Finished | BaseException


class Outbox:
    """Items on their way to the consumer. Only touched on the event loop."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._ready = asyncio.Event()
        self.ended = asyncio.Event()

    def put(self, items: Sequence[Item]) -> None:
        """The last item is a :class:`Finished` or an exception; what comes after it is dropped."""
        for item in items:
            if self.ended.is_set():
                return
            self._items.append(item)
            if not isinstance(item, TokenChunk):
                self.ended.set()
        self._ready.set()

    async def get(self) -> Item:
        while not self._items:
            self._ready.clear()
            await self._ready.wait()
        return self._items.popleft()


class Stream:
    """State of one request between steps. Only the worker touches it once it was submitted.

    Args:
        request: validated.
        row: its injected KV, which covers the prompt.
        stop_ids: ids that end it.
        max_context: tokens of prompt plus output.
    """

    def __init__(
        self,
        request: DecodeRequest,
        row: Storage,
        sampler: Sampler,
        *,
        stop_ids: frozenset[int],
        max_context: int,
        lookup: PromptLookup | None = None,
    ) -> None:
        self.request = request
        self.row = row
        self.sampler = sampler
        self.outbox = Outbox()
        self.cancelled = False
        self.lookup = lookup
        self._stop_ids = stop_ids
        self._limit = min(request.max_tokens, max_context - len(request.prompt_token_ids))
        self._last = request.first_token
        self._proposed: list[int] = []

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return self._limit - self.sampler.count

    def first(self) -> list[Item]:
        """Items of the prefill's token, which are due at once."""
        request = self.request
        logprobs = () if request.logprobs is None or request.first_logprob is None else (request.first_logprob,)
        self.sampler.accept(request.first_token)
        items: list[Item] = [TokenChunk((request.first_token,), logprobs)]
        end = self._end(request.first_token)
        return [*items, end] if end else items

    def feed(self) -> Feed:
        """What to compute next: the last token and, behind it, a guess of what follows."""
        self._proposed = self.lookup.propose(self.remaining - 1) if self.lookup else []
        start = len(self.request.prompt_token_ids) + self.sampler.count - 1
        return Feed(self.row, start, (self._last, *self._proposed))

    def take(self, picks: Sequence[tuple[int, TokenLogprob | None]], end: Finished | None) -> list[Item]:
        """Items of the tokens that a step gave."""
        tokens = tuple(token for token, _ in picks)
        self._last = tokens[-1]
        if self.lookup:
            self.lookup.extend(tokens)
            if self._proposed:
                self.lookup.verified(len(self._proposed), len(tokens) - 1)
        chunk = TokenChunk(tokens, tuple(logprob for _, logprob in picks if logprob is not None))
        return [chunk, end] if end else [chunk]

    def agrees(self, index: int, token: int) -> bool:
        """Whether guess number ``index`` was ``token``, so that the logits behind it are of the real text."""
        return index < len(self._proposed) and self._proposed[index] == token

    def accept(self, token: int) -> Finished | None:
        """Count a sampled token; the end if it is the last."""
        self.sampler.accept(token)
        return self._end(token)

    def _end(self, token: int) -> Finished | None:
        count = self.sampler.count
        if token in self._stop_ids and count >= self.request.min_tokens:
            return Finished(FinishReason.STOP, count, token)
        return Finished(FinishReason.LENGTH, count) if count >= self._limit else None
