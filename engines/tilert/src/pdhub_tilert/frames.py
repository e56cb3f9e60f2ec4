"""A decode server's stream: one JSON document a line.

``{"t": [ids], "lp": […], "tp": […]}`` as often as there are tokens, then ``{"done": true, "n", "finish_reason",
"timing_ms"}``, or ``{"error", "error_type"}``. The id that ended the answer is not part of it, unless it is the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pdhub.api import (
    EngineFailed,
    Finished,
    FinishReason,
    LineParser,
    RequestCancelled,
    TokenChunk,
    TokenLogprob,
)
from pdhub_tilert.refusals import error_of

_WAITS: Final = ("wire_wait", "convert", "inject")


class TileRTFrames(LineParser):
    """One stream.

    Args:
        first: what prefill sampled. first_logprob: its log probability; the node knows none.
        logprobs: alternatives a token; None = not asked for.
        max_tokens: an answer that long ended by length, whatever its last line says.
        kv_bytes: handed over for this prompt; for the record.
    """

    def __init__(
        self,
        first: int,
        max_tokens: int,
        *,
        first_logprob: TokenLogprob | None = None,
        logprobs: int | None = None,
        kv_bytes: int = 0,
    ) -> None:
        super().__init__()
        self._first = first
        self._first_logprob = first_logprob
        self._logprobs = logprobs
        self._max_tokens = max_tokens
        self._kv_bytes = float(kv_bytes)
        self._count = 0
        self._finished = False
        self._stats: dict[str, float] = {}

    def eof(self) -> None:
        if not self._finished:
            raise EngineFailed("the node's stream ended before its last line")

    def stats(self) -> Mapping[str, float]:
        return self._stats

    def read(self, line: bytes) -> Sequence[TokenChunk | Finished]:
        try:
            frame = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise EngineFailed("the node sent a line that is no frame") from error
        if self._finished:
            raise EngineFailed("the node sent a line after its last one")
        if not isinstance(frame, dict):
            raise EngineFailed("the node sent a line that is no frame")
        if "error" in frame:
            raise error_of(frame) or EngineFailed("the node sent an error that cannot be read")
        if "t" in frame:
            return [self._tokens(frame)]
        if frame.get("done") is True:
            return self._done(frame)
        raise EngineFailed("the node sent a line that is no frame")

    def _tokens(self, frame: Mapping[str, Any]) -> TokenChunk:
        ids = frame["t"]
        if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
            raise EngineFailed("the node sent tokens that are no ids")
        if not self._count and ids[0] != self._first:
            raise EngineFailed("the node began with another token than prefill sampled")
        entries = () if self._logprobs is None else self._entries(ids, frame)
        self._count += len(ids)
        self._stats = self._stats or {"kv_bytes": self._kv_bytes}
        return TokenChunk(tuple(ids), entries)

    def _entries(self, ids: Sequence[int], frame: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
        values, tops = frame.get("lp"), frame.get("tp")
        if not isinstance(values, list) or not isinstance(tops, list) or not len(values) == len(tops) == len(ids):
            raise EngineFailed("the node sent tokens without their log probabilities")
        out = []
        for at, (token, value, top) in enumerate(zip(ids, values, tops, strict=True)):
            if at == 0 and self._count == 0 and self._first_logprob is not None:
                out.append(self._first_logprob)
                continue
            try:
                pairs = tuple((int(i), float(p)) for i, p in top[: self._logprobs])
                out.append(TokenLogprob(token, float(value), pairs))
            except (TypeError, ValueError) as error:
                raise EngineFailed("the node sent log probabilities that are no numbers") from error
        return tuple(out)

    def _done(self, frame: Mapping[str, Any]) -> list[TokenChunk | Finished]:
        timing, count, reason = frame.get("timing_ms"), frame.get("n"), frame.get("finish_reason")
        timing = timing if isinstance(timing, Mapping) else {}
        waits = [float(timing[name]) for name in _WAITS if isinstance(timing.get(name), (int, float))]
        self._stats = {"kv_bytes": self._kv_bytes, **({"handoff_ms": sum(waits)} if waits else {})}
        if reason == "cancelled":
            raise RequestCancelled("the request was cancelled at the node")
        self._finished = True
        if count == 0 and self._count <= 1 and reason == "stop":
            # The first token ended it. Some engines send it all the same; either way it was produced and counts.
            return [*self._unsent_first(), Finished(FinishReason.STOP, 1, self._first)]
        if count != self._count:
            raise EngineFailed(f"the node sent {self._count} tokens and says that it sent {count}")
        if reason not in ("stop", "length"):
            raise EngineFailed(f"the node ended with an unknown reason '{reason}'")
        stopped = reason == "stop" and self._count < self._max_tokens
        return [Finished(FinishReason.STOP if stopped else FinishReason.LENGTH, self._count)]

    def _unsent_first(self) -> list[TokenChunk]:
        if self._count:
            return []
        if self._logprobs is None:
            return [TokenChunk((self._first,))]
        if self._first_logprob is None:
            raise EngineFailed("prefill told no log probability of its token")
        return [TokenChunk((self._first,), (self._first_logprob,))]
