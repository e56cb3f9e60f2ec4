"""Parsing by the prefill instance: vLLM's endpoint ``/v1/chat/completions/derender``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pdhub.api import (
    Call,
    InvalidRequest,
    OutputParser,
    ParsedDelta,
    ParsedMessage,
    ParseRequest,
    ParserFailed,
    Piece,
    RequestError,
    ToolCall,
    ToolCallDelta,
)

PATH: Final = "/v1/chat/completions/derender"
PROBE: Final = {"generate_response": {"request_id": "pdhub", "choices": [{"index": 0, "token_ids": [0]}]}}
AGAIN_S: Final = 30.0
"""After which an instance that had it off is asked again."""
ON_S: Final = 600.0

REST: Final = 3.0
"""Words wait for so many times as long as the last call took: an answer keeps the endpoint busy for a quarter of its
time at most."""
LONGEST_S: Final = 1.0
PATIENCE: Final = 3
"""So many runs of words may turn out to mean more; then each token of the answer is a call."""

_MARKS: Final = frozenset("<>[]{}|｜`$\\")
"""No parser's mark is without one of these, but for phrases, which show themselves by not being shown."""


def is_words(piece: Piece) -> bool:
    """Whether a piece is plain text: nothing in it that a mark may begin with, nor a line's end, which parsers hold."""
    return bool(piece.text) and not piece.text.endswith("\n") and _MARKS.isdisjoint(piece.text)


class Endpoints:
    """Which prefill instances parse. An instance is asked when a request first needs it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bool, float]] = {}

    async def on(self, request: ParseRequest) -> bool:
        """Whether the request's instance has the endpoint on, with parsers behind it."""
        on, until = self._known.get(request.instance, (False, 0.0))
        if time.monotonic() < until:
            return on
        assert request.ask is not None
        try:
            await request.ask(Call("POST", PATH, set=PROBE))
            on = False  # it answered: without parsers
        except InvalidRequest as error:
            on = "chat_request is required" in error.message  # with parsers it insists on the request
        except RequestError:
            on = False
        self._known[request.instance] = (on, time.monotonic() + (ON_S if on else AGAIN_S))
        return on

    def forget(self, instance: str) -> None:
        """It did not parse after all."""
        self._known.pop(instance, None)


class DerenderParser(OutputParser):
    """One answer.

    The endpoint keeps no state: with every call of a stream it parses all that came before again. What must be parsed
    token by token is a call each. A run of plain words is one call, for it means the same however it is cut, and waits
    for some time after a call that took long: so what an answer of words costs grows with its length, not with the
    square of it.

    Args:
        clock: seconds.
    """

    keeps_special_tokens = True

    def __init__(
        self, request: ParseRequest, endpoints: Endpoints, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert request.ask is not None
        self._ask = request.ask
        self._request = request
        self._endpoints = endpoints
        self._clock = clock
        self._prompt: list[int] = []
        self._state: Any = None
        self._waiting: list[Piece] = []
        self._rested_at = 0.0  # from then on words need not wait
        self._clear = False  # what was parsed last was shown at once, as it was
        self._surprises = 0

    def begin(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt = list(prompt_token_ids)

    async def feed(self, pieces: Sequence[Piece], *, ended: bool) -> ParsedDelta:
        self._waiting += pieces
        told: list[ParsedDelta] = []
        while self._waiting:
            run = self._words(ended)
            if run and not ended and run == len(self._waiting) and self._clock() < self._rested_at:
                break
            told += await self._parsed(max(1, run), ended)
        return ParsedDelta(
            "".join(delta.content for delta in told),
            "".join(delta.reasoning for delta in told),
            tuple(call for delta in told for call in delta.tool_calls),
        )

    def _words(self, ended: bool) -> int:
        """How many of the pieces that wait are a run of words that may be parsed at once."""
        if not self._clear or self._surprises >= PATIENCE:
            return 0
        among = self._waiting[:-1] if ended else self._waiting
        return next((n for n, piece in enumerate(among) if not is_words(piece)), len(among))

    async def _parsed(self, count: int, ended: bool) -> list[ParsedDelta]:
        """Take so many pieces that wait, and parse them."""
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        last = ended and not self._waiting
        state = self._state
        delta = await self._step(taken, last=last)
        text = "".join(piece.text for piece in taken)
        shown = delta.content or delta.reasoning
        alone = not (delta.content and delta.reasoning) and not delta.tool_calls
        if count > 1 and not (alone and shown == text):
            # Something in them means more than it says, so they are parsed as everything else.
            self._surprises += 1
            self._state, self._clear = state, False
            self._waiting = taken + self._waiting
            return [one for _ in taken for one in await self._parsed(1, ended)]
        self._clear = alone and bool(text) and shown.endswith(text)
        return [delta]

    async def _step(self, pieces: Sequence[Piece], *, last: bool) -> ParsedDelta:
        # The token that ends an answer is not part of its text, but would be decoded.
        ids = [] if last and not pieces[-1].text else [token for piece in pieces for token in piece.token_ids]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop" if last else None}
        began = self._clock()
        answer = await self._call(
            {
                "stream": True,
                "generate_chunk": {"request_id": "pdhub", "choices": [choice]},
                "stream_state": self._state,
                **self._about(),
            }
        )
        now = self._clock()
        self._rested_at = now + min(LONGEST_S, REST * (now - began))
        self._state = answer["stream_state"]
        delta = answer["chunk"]["choices"][0]["delta"]
        calls = []
        for call in delta.get("tool_calls") or ():
            told = call.get("function") or {}
            calls.append(ToolCallDelta(call["index"], call.get("id"), told.get("name"), told.get("arguments") or ""))
        return ParsedDelta(delta.get("content") or "", delta.get("reasoning") or "", tuple(calls))

    async def whole(self, pieces: Sequence[Piece]) -> ParsedMessage:
        counted = pieces if pieces[-1].text else pieces[:-1]
        ids = [token for piece in counted for token in piece.token_ids]
        if not ids:
            return ParsedMessage("")
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop"}
        response = {"request_id": "pdhub", "choices": [choice], "prompt_token_ids": self._prompt}
        answer = await self._call({"generate_response": response, **self._about()})
        message = answer["choices"][0]["message"]
        calls = tuple(
            ToolCall(
                call["function"].get("id") or f"chatcmpl-tool-{call['id']}",  # as all other endpoints name them
                call["function"]["name"],
                call["function"]["arguments"],
            )
            for call in message.get("tool_calls") or ()
        )
        if self._request.body.get("parallel_tool_calls") is False:
            calls = calls[:1]
        return ParsedMessage(message.get("content"), message.get("reasoning"), calls)

    def _about(self) -> dict[str, Any]:
        return {"chat_request": dict(self._request.body), "prompt_token_ids": self._prompt}

    async def _call(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return await self._ask(Call("POST", PATH, set=body))
        except RequestError as error:
            self._endpoints.forget(self._request.instance)
            raise ParserFailed("the prefill instance could not parse the answer") from error
