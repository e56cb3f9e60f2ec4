"""Parser of a node's token stream: one JSON frame a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from pdhub.api.engine import Finished, FinishReason, TokenChunk, TokenLogprob
from pdhub.api.errors import EngineFailed, RequestError
from pdhub.api.lines import LineParser
from pdhub.wire import errors as wire_errors
from pdhub.wire.http import Done, ErrorBody, Frame, LogprobEntry

_decoder = msgspec.json.Decoder(Frame)


class NodeFrames(LineParser):
    """One stream. The order is fixed: a start frame, tokens, then ``done`` or ``error``."""

    def __init__(self) -> None:
        super().__init__()
        self._stats: dict[str, float] = {}
        self._count = 0
        self._finished = False

    def eof(self) -> None:
        if not self._finished:
            raise EngineFailed("the node's stream ended before its last frame")

    def stats(self) -> Mapping[str, float]:
        return self._stats

    def read(self, line: bytes) -> Iterator[TokenChunk | Finished]:
        try:
            frame = _decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineFailed("the node sent a line that is no frame") from error
        if self._finished:
            raise EngineFailed("the node sent a frame after its last one")
        if frame.error is not None:
            raise _error(frame.error)
        if frame.s is not None:
            s = frame.s
            self._stats = {"handoff_ms": s.handoff_ms, "wait_ms": s.wait_ms, "kv_bytes": float(s.kv_bytes)}
        if frame.t:
            self._count += len(frame.t)
            yield TokenChunk(tuple(frame.t), tuple(_logprob(entry) for entry in frame.lp or ()))
        if frame.done is not None:
            yield self._done(frame.done)

    def _done(self, done: Done) -> Finished:
        if done.n != self._count:
            raise EngineFailed(f"the node sent {self._count} tokens and says that it sent {done.n}")
        self._finished = True
        try:
            return Finished(FinishReason(done.reason), done.n, done.stop_token)
        except ValueError as error:
            raise EngineFailed(f"the node ended with an unknown reason '{done.reason}'") from error


def _logprob(entry: LogprobEntry) -> TokenLogprob:
    token, logprob, top = entry
    return TokenLogprob(token, logprob, tuple((t, value) for t, value in top))


_STATUS_OF_TYPE = {"invalid_request_error": 400, "rate_limit_error": 429}


def _error(error: ErrorBody) -> RequestError:
    status = _STATUS_OF_TYPE.get(error.type, 502)
    return wire_errors.from_body(status, {"error": msgspec.to_builtins(error)})
