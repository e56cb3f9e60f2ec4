"""The conformance kit for parsers of reasoning and tool calls. Subclass, override :meth:`factory` and :meth:`answers`::

class TestMine(ParserConformance):
    @pytest.fixture
    async def factory(self):
        factory = MyFactory(MyConfig(...), make_context(tokenizer="/models/mine"))
        await factory.start()
        yield factory
        await factory.close()

    @pytest.fixture
    def answers(self):
        return [[Piece("<think>", (5,)), Piece("hm", (9,)), Piece("</think>", (6,)), Piece("yes", (7,)), Piece("")]]
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdhub.api import (
    OutputParser,
    ParsedDelta,
    ParsedMessage,
    ParserContext,
    ParseRequest,
    ParserFactory,
    Piece,
    Topology,
)

BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    ],
}
"""A request that offers a tool."""


def make_context(tokenizer: str | None = None) -> ParserContext:
    """What a router would give, for a deployment of nothing."""
    return ParserContext("m", tokenizer, Topology("m", None, (), "shm"))


@dataclass
class Heard:
    """What a client makes of the deltas of one answer."""

    content: str = ""
    reasoning: str = ""
    ids: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    arguments: dict[int, str] = field(default_factory=dict)
    reasoning_tokens: int | None = None

    def add(self, delta: ParsedDelta) -> None:
        """The next one. Raises AssertionError if it contradicts those before."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.reasoning_tokens = delta.reasoning_tokens
        for call in delta.tool_calls:
            if call.index not in self.arguments:
                assert call.index == len(self.arguments), "calls are numbered as they come"
                assert call.id, "the first delta of a call has its id"
                assert call.name, "and its name"
                self.ids.append(call.id)
                self.names.append(call.name)
                self.arguments[call.index] = ""
            else:
                assert (call.id, call.name) == (None, None), "id and name come once"
            self.arguments[call.index] += call.arguments

    def meaning(self) -> tuple[Any, ...]:
        """All but the ids, which are drawn."""
        return self.content, self.reasoning, self.names, self.arguments, self.reasoning_tokens


class ParserConformance:
    """Rules for parsers."""

    @pytest.fixture
    async def factory(self) -> ParserFactory:
        raise NotImplementedError("override the `factory` fixture with a started factory")

    @pytest.fixture
    def answers(self) -> Sequence[Sequence[Piece]]:
        """Answers, piece by piece, with all that the parser knows in them: reasoning, calls, neither, both, broken."""
        raise NotImplementedError("override the `answers` fixture")

    @pytest.fixture
    def body(self) -> dict[str, Any]:
        """The request that they answer."""
        return BODY

    async def test_R01_the_grouping_of_pieces_changes_nothing(
        self, factory: ParserFactory, answers: Sequence[Sequence[Piece]], body: dict[str, Any]
    ) -> None:
        """An engine that gives several tokens at once must not lose a call, or show a mark."""
        for answer in answers:
            told = [await _read(factory, body, answer, cuts) for cuts in _cuts(len(answer))]
            assert all(one.meaning() == told[0].meaning() for one in told)

    async def test_R02_answers_do_not_mix(
        self, factory: ParserFactory, answers: Sequence[Sequence[Piece]], body: dict[str, Any]
    ) -> None:
        """All at once, a piece of each in turn."""
        alone = [await _read(factory, body, answer, ()) for answer in answers]
        parsers = [await _open(factory, body, stream=True) for _ in answers]
        heard = [Heard() for _ in answers]
        for place in range(max(map(len, answers))):
            for parser, answer, one in zip(parsers, answers, heard, strict=True):
                if place < len(answer):
                    ended = place == len(answer) - 1
                    one.add(await parser.feed(answer[place : place + 1], ended=ended))
        for parser in parsers:
            parser.close()
        assert [one.meaning() for one in heard] == [one.meaning() for one in alone]

    async def test_R03_a_whole_answer_means_what_its_deltas_mean(
        self, factory: ParserFactory, answers: Sequence[Sequence[Piece]], body: dict[str, Any]
    ) -> None:
        """Which calls, and whether there is reasoning, must not depend on whether the client streams."""
        for answer in answers:
            streamed = await _read(factory, body, answer, ())
            parser = await _open(factory, body, stream=False)
            whole = await parser.whole(answer)
            parser.close()
            assert isinstance(whole, ParsedMessage)
            assert [call.name for call in whole.tool_calls] == streamed.names
            assert all(call.id for call in whole.tool_calls)
            assert (whole.reasoning or "").strip() == streamed.reasoning.strip()

    async def test_R04_an_answer_may_end_anywhere(
        self, factory: ParserFactory, answers: Sequence[Sequence[Piece]], body: dict[str, Any]
    ) -> None:
        """A client leaves, or the limit of tokens comes, in the middle of a call."""
        for answer in answers:
            for end in range(1, len(answer)):
                parser = await _open(factory, body, stream=True)
                Heard().add(await parser.feed(answer[:end], ended=end % 2 == 0))
                parser.close()

    async def test_R05_a_parser_that_is_not_used_is_no_burden(
        self, factory: ParserFactory, body: dict[str, Any]
    ) -> None:
        """The node was busy; the request went elsewhere."""
        for _ in range(50):
            (await _open(factory, body, stream=True)).close()
        assert not factory.problem


async def _open(factory: ParserFactory, body: dict[str, Any], *, stream: bool) -> OutputParser:
    parser = await factory.open(ParseRequest({**body, "stream": stream}, stream))
    parser.begin([1, 2, 3])
    return parser


async def _read(factory: ParserFactory, body: dict[str, Any], answer: Sequence[Piece], cuts: Sequence[int]) -> Heard:
    parser, heard = await _open(factory, body, stream=True), Heard()
    edges = [0, *cuts, len(answer)]
    for start, end in itertools.pairwise(edges):
        heard.add(await parser.feed(answer[start:end], ended=end == len(answer)))
    parser.close()
    return heard


def _cuts(size: int) -> list[list[int]]:
    """One by one, all at once, every single cut, and some drawn."""
    rng = random.Random(size)
    drawn = [sorted(rng.sample(range(1, size), rng.randrange(1, size))) for _ in range(4)] if size > 1 else []
    return [list(range(1, size)), [], *([cut] for cut in range(1, size)), *drawn]
