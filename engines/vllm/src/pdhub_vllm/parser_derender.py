"""Parsing by the prefill instance: vLLM's endpoint ``/v1/chat/completions/derender``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
    """One answer. The endpoint keeps no state: with every piece of a stream it parses all that came before again."""

    keeps_special_tokens = True

    def __init__(self, request: ParseRequest, endpoints: Endpoints) -> None:
        assert request.ask is not None
        self._ask = request.ask
        self._request = request
        self._endpoints = endpoints
        self._prompt: list[int] = []
        self._state: Any = None

    def begin(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt = list(prompt_token_ids)

    async def feed(self, pieces: Sequence[Piece], *, ended: bool) -> ParsedDelta:
        content = reasoning = ""
        calls: list[ToolCallDelta] = []
        for place, piece in enumerate(pieces):
            last = ended and place == len(pieces) - 1
            # The token that ends an answer is not part of its text, but would be decoded.
            ids = [] if last and not piece.text else list(piece.token_ids)
            choice = {"index": 0, "token_ids": ids, "finish_reason": "stop" if last else None}
            body = {
                "stream": True,
                "generate_chunk": {"request_id": "pdhub", "choices": [choice]},
                "stream_state": self._state,
                **self._about(),
            }
            answer = await self._call(body)
            self._state = answer["stream_state"]
            delta = answer["chunk"]["choices"][0]["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or ():
                told = call.get("function") or {}
                calls.append(
                    ToolCallDelta(call["index"], call.get("id"), told.get("name"), told.get("arguments") or "")
                )
        return ParsedDelta(content, reasoning, tuple(calls))

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
