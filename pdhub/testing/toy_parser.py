"""A parser to test with: ``<r>reasoning</r>`` anywhere, ``<c:NAME>ARGUMENTS</c>`` for calls, all else is content.

As a plugin (``plugins=[toy_parser]`` of the hub): ``model.parser: {type: toy, config: …}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import Field

from pdhub.api import (
    Feature,
    OutputParser,
    ParsedDelta,
    ParserContext,
    ParseRequest,
    ParserFactory,
    ParserFailed,
    ParserSpec,
    Piece,
    PluginConfig,
    Stability,
    ToolCallDelta,
    hookimpl,
)

_MARK: Final = re.compile(r"<r>|</r>|<c:[a-z]+>|</c>")
_BEGUN: Final = re.compile(r"<(/?r?|/?c?|c:[a-z]*)$")


class ToyParserConfig(PluginConfig):
    """Options of ``toy``."""

    dies_at: str = Field("", description="Fails when this text comes; empty = never.")
    problem: str = Field("", description="Why it cannot parse; empty = it can.")


class ToyParser(OutputParser):
    """See the module."""

    def __init__(self, dies_at: str = "") -> None:
        self._dies_at = dies_at
        self._held = ""
        self._mode = "content"
        self._calls = 0
        self._reasoned = 0

    async def feed(self, pieces: Sequence[Piece], *, ended: bool) -> ParsedDelta:
        said: dict[str, str] = {"content": "", "reasoning": ""}
        calls: list[ToolCallDelta] = []
        for piece in pieces:
            if self._dies_at and self._dies_at in self._held + piece.text:
                raise ParserFailed("the toy parser died")
            self._reasoned += len(piece.token_ids) if self._mode == "reasoning" else 0
            self._step(piece.text, said, calls)
        if ended:
            self._say(self._held, said, calls)
        return ParsedDelta(said["content"], said["reasoning"], tuple(calls), self._reasoned)

    def _step(self, text: str, said: dict[str, str], calls: list[ToolCallDelta]) -> None:
        self._held += text
        while (mark := _MARK.search(self._held)) is not None:
            self._say(self._held[: mark.start()], said, calls)
            self._held = self._held[mark.end() :]
            self._turn(mark[0], calls)
        begun = _BEGUN.search(self._held)
        sure = begun.start() if begun else len(self._held)
        self._say(self._held[:sure], said, calls)
        self._held = self._held[sure:]

    def _turn(self, mark: str, calls: list[ToolCallDelta]) -> None:
        self._mode = {"<r>": "reasoning", "</r>": "content", "</c>": "content"}.get(mark, "call")
        if self._mode == "call":
            self._calls += 1
            calls.append(ToolCallDelta(self._calls - 1, f"call-{self._calls}", mark[3:-1]))

    def _say(self, text: str, said: dict[str, str], calls: list[ToolCallDelta]) -> None:
        if not text:
            return
        if self._mode == "call":
            calls.append(ToolCallDelta(self._calls - 1, arguments=text))
        else:
            said[self._mode] += text


class ToyParserFactory(ParserFactory):
    """See :class:`pdhub.api.ParserFactory`."""

    def __init__(self, config: ToyParserConfig, context: ParserContext) -> None:
        self._config = config
        self._context = context
        self.problem = config.problem

    def set_problem(self, problem: str) -> None:
        """As if it died, or came back."""
        self.problem = problem
        self._context.changed()

    def wanted(self, body: Mapping[str, Any]) -> bool:
        return True

    async def open(self, request: ParseRequest) -> OutputParser:
        if self.problem:
            raise ParserFailed("the toy parser is not there")
        return ToyParser(self._config.dies_at)


def _declares(config: ToyParserConfig) -> frozenset[Feature]:
    return frozenset({Feature.TOOLS, Feature.REASONING})


@hookimpl
def pdhub_register_parsers() -> list[ParserSpec]:
    return [
        ParserSpec(
            name="toy",
            summary="Marks that a person can read; for tests.",
            config=ToyParserConfig,
            stability=Stability.ALPHA,
            factory=ToyParserFactory,
            declares=_declares,
        )
    ]
