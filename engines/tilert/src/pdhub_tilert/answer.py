"""One answer on its way from TileRT's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from pdhub.api import (
    DecodeRequest,
    EngineFailed,
    Finished,
    FinishReason,
    RequestCancelled,
    TokenChunk,
    TokenLogprob,
)

Item = TokenChunk | Finished | BaseException


class Answer:
    """TileRT's thread calls :meth:`begin`, :meth:`token`, :meth:`finish` and :meth:`end`; the loop all else.

    Tokens that come faster than the loop looks become one chunk: nothing is polled, and a burst costs one wake-up.
    """

    def __init__(self, request: DecodeRequest, loop: asyncio.AbstractEventLoop) -> None:
        self._request, self._loop = request, loop
        self.cancelled = threading.Event()
        self.ended = asyncio.Event()
        self._lock = threading.Lock()
        self._fresh: list[tuple[int, TokenLogprob | None]] = []
        self._end: Finished | BaseException | None = None
        self._woken = False
        self._count = 0
        self._first_seen = False
        self._items: deque[Item] = deque()
        self._ready = asyncio.Event()

    # TileRT's thread

    def begin(self) -> None:
        """The KV is injected: prefill's token is due."""
        self._count = 1
        self._put(self._request.first_token, self._request.first_logprob)

    def token(self, token: int, logprob: float | None = None, candidates: Sequence[Any] | None = None) -> None:
        """``on_token`` of ``decode``. Its first call repeats prefill's token. Raises EngineFailed."""
        if not self._first_seen:
            self._first_seen = True
            if token != self._request.first_token:
                raise EngineFailed("TileRT began with another token than prefill sampled")
            return
        entry = None
        if self._request.logprobs is not None:
            if logprob is None:
                raise EngineFailed("TileRT gave a token without its log probability")
            top = tuple((int(i), float(p)) for i, p in (candidates or ())[: self._request.logprobs])
            entry = TokenLogprob(int(token), float(logprob), top)
        self._count += 1
        self._put(int(token), entry)

    def finish(self, tokens: Sequence[int], reason: Any) -> Finished:
        """What ``decode`` returned, and ``finish_reason`` of its statistics, as the end of the stream.

        The id that ended the answer is not among the tokens, unless it is the first; then there are none.
        Raises RequestCancelled, EngineFailed.
        """
        if self.cancelled.is_set() or reason == "cancelled":
            raise RequestCancelled("the request was cancelled")
        if not tokens and reason == "stop" and self._count == 1:
            return Finished(FinishReason.STOP, 1, self._request.first_token)
        if len(tokens) != self._count:
            raise EngineFailed(f"TileRT gave {self._count} tokens and says that it gave {len(tokens)}")
        if reason not in ("stop", "length"):
            raise EngineFailed(f"TileRT ended with an unknown reason '{reason}'")
        stopped = reason == "stop" and self._count < self._request.max_tokens
        return Finished(FinishReason.STOP if stopped else FinishReason.LENGTH, self._count)

    def end(self, last: Finished | BaseException) -> None:
        """Nothing follows, and TileRT has forgotten the request."""
        with self._lock:
            self._end = last
        self._wake()

    def _put(self, token: int, entry: TokenLogprob | None) -> None:
        with self._lock:
            self._fresh.append((token, entry if self._request.logprobs is not None else None))
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._woken:
                return
            self._woken = True
        self._loop.call_soon_threadsafe(self._collect)

    # the loop

    async def get(self) -> Item:
        """The next item. Once only after the last."""
        while not self._items:
            self._ready.clear()
            await self._ready.wait()
        return self._items.popleft()

    def _collect(self) -> None:
        with self._lock:
            fresh, self._fresh, self._woken = self._fresh, [], False
            end = self._end
        if fresh:
            entries = tuple(entry for _, entry in fresh if entry is not None)
            self._items.append(TokenChunk(tuple(token for token, _ in fresh), entries))
        if end is not None:
            self._items.append(end)
            self.ended.set()
        self._ready.set()
