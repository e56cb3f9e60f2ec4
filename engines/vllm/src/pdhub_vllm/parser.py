"""vLLM's reasoning and tool parsers for pools that speak tokens, run by a child process or by the prefill instance."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdhub.api import (
    AdmissionRejected,
    InvalidRequest,
    OutputParser,
    ParsedDelta,
    ParsedMessage,
    ParserContext,
    ParseRequest,
    ParserFactory,
    ParserFailed,
    Piece,
    ToolCall,
    ToolCallDelta,
    Unsupported,
)
from pdhub_vllm.parser_config import Via, VLLMParserConfig
from pdhub_vllm.parser_derender import DerenderParser, Endpoints
from pdhub_vllm.parser_process import SCRIPT, ParserProcess
from pdhub_vllm.parser_python import python_of, tokenizer_of


class VLLMParserFactory(ParserFactory):
    """See :class:`pdhub.api.ParserFactory`.

    Raises:
        ConfigError: no directory with the model's tokenizer.
    """

    def __init__(self, config: VLLMParserConfig, context: ParserContext) -> None:
        self._config = config
        self._numbers = itertools.count(1)
        self._endpoints = Endpoints()
        self._process: ParserProcess | None = None
        if config.via is not Via.DERENDER:
            options = {
                **config.model_dump(
                    include={
                        "reasoning", "tools", "chat_template_kwargs", "tools_plugin", "reasoning_plugin",
                        "tokenizer_mode", "trust_remote_code",
                    }
                ),
                "tokenizer": tokenizer_of(context),
                "model": context.model,
            }  # fmt: skip
            self._process = ParserProcess(
                [python_of(config, context.topology), str(SCRIPT), json.dumps(options)],
                start_within_s=config.start_within_s,
                within_s=config.within_s,
                queue=config.queue,
                changed=context.changed,
            )

    @property
    def problem(self) -> str:  # type: ignore[override]  # the process knows it
        return "" if self._process is None or not self._process.problem else f"vLLM's parsers: {self._process.problem}"

    async def start(self) -> None:
        if self._process is not None:
            self._process.start()

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()

    def wanted(self, body: Mapping[str, Any]) -> bool:
        """A parser of calls alone has nothing to do where no tools are offered, but for those that vLLM builds on its
        parser engine: they see every answer."""
        process = self._process
        if self._config.reasoning is not None or (process and not process.problem and process.facts.get("always")):
            return True
        return bool(body.get("tools")) and body.get("tool_choice") != "none"

    async def open(self, request: ParseRequest) -> OutputParser:
        if await self._by_derender(request):
            return DerenderParser(request, self._endpoints)
        process = self._process
        if process is None:
            raise Unsupported("the prefill instance's derender endpoint cannot parse the answer to this request")
        if process.full:
            raise AdmissionRejected("the parser of reasoning and tool calls has too much to do", code="busy")
        number, life = next(self._numbers), process.life
        usage = request.body.get("stream_options")
        continuous = isinstance(usage, Mapping) and bool(usage.get("continuous_usage_stats"))
        order = {"id": number, "open": _asked(request.body), "continuous": continuous}
        answer = _checked(await process.ask(life, order))
        return _ChildParser(process, life, number, keeps=bool(answer.get("keeps_special_tokens")))

    async def _by_derender(self, request: ParseRequest) -> bool:
        via = self._config.via
        if via is Via.CHILD or request.ask is None or request.body.get("stop"):
            return False  # it decodes all tokens again, those of a stop string too
        if via is Via.AUTO and request.stream:
            return False
        return await self._endpoints.on(request)


class _ChildParser(OutputParser):
    def __init__(self, process: ParserProcess, life: int, number: int, *, keeps: bool) -> None:
        self._process = process
        self._life = life
        self._number = number
        self.keeps_special_tokens = keeps

    def begin(self, prompt_token_ids: Sequence[int]) -> None:
        self._process.tell(self._life, {"id": self._number, "prompt": list(prompt_token_ids)})

    async def feed(self, pieces: Sequence[Piece], *, ended: bool) -> ParsedDelta:
        order = {"id": self._number, "feed": _plain(pieces), "ended": ended}
        answer = _checked(await self._process.ask(self._life, order))
        calls = tuple(ToolCallDelta(**call) for call in answer["tool_calls"])
        return ParsedDelta(answer["content"], answer["reasoning"], calls, answer["reasoning_tokens"])

    async def whole(self, pieces: Sequence[Piece]) -> ParsedMessage:
        answer = _checked(await self._process.ask(self._life, {"id": self._number, "whole": _plain(pieces)}))
        calls = tuple(ToolCall(**call) for call in answer["tool_calls"])
        return ParsedMessage(answer["content"], answer["reasoning"], calls, answer["reasoning_tokens"])

    def close(self) -> None:
        self._process.tell(self._life, {"id": self._number, "close": True})


def _plain(pieces: Sequence[Piece]) -> list[Any]:
    return [[piece.text, piece.token_ids] for piece in pieces]


def _asked(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request without what its messages say: no parser reads that, and it may be long."""
    messages = [
        {**message, "content": "" if message.get("content") is not None else None} for message in body["messages"]
    ]
    return {**body, "messages": messages}


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" not in answer:
        return answer
    if answer["wrong"]:
        raise InvalidRequest(str(answer["error"]))
    raise ParserFailed("vLLM's parser failed on this answer")
