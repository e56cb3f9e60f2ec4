"""The toy parser passes the kit; each of its rules catches a broken parser."""

import inspect
from dataclasses import replace

import pytest

from pdhub.api import ParsedDelta, ParsedMessage, ParserFactory, Piece
from pdhub.testing import ParserConformance
from pdhub.testing.parser_kit import BODY, make_context
from pdhub.testing.toy_parser import ToyParser, ToyParserConfig, ToyParserFactory


def pieces(text):
    return [*(Piece(character, (ord(character),)) for character in text), Piece("")]


ANSWERS = [
    pieces("<r>why</r>because"),
    pieces('ask <c:weather>{"a": 1}</c> and <c:time>{}</c>.'),
    pieces("plain < text </"),
    pieces("<r>cut"),
    pieces("<c:weather>"),
]


class TestToy(ParserConformance):
    @pytest.fixture
    async def factory(self):
        return ToyParserFactory(ToyParserConfig(), make_context())

    @pytest.fixture
    def answers(self):
        return ANSWERS


class ByTheBatch(ToyParser):
    """Looks for marks in each batch alone."""

    async def feed(self, pieces, *, ended):
        text = "".join(piece.text for piece in pieces)
        return await super().feed([Piece(text.replace("<r>", ""), ())], ended=ended)


class Shared(ToyParser):
    shared = ToyParser()

    async def feed(self, pieces, *, ended):
        return await self.shared.feed(pieces, ended=ended)


class OtherWhole(ToyParser):
    async def whole(self, pieces):
        return ParsedMessage("".join(piece.text for piece in pieces))


class Impatient(ToyParser):
    async def feed(self, pieces, *, ended):
        delta = await super().feed(pieces, ended=ended)
        first = [replace(call, id=None) if call.name else call for call in delta.tool_calls]
        return replace(delta, tool_calls=tuple(first))


class Leaking(ToyParserFactory):
    opened = 0

    async def open(self, request):
        self.opened += 1
        self.problem = "full" if self.opened > 40 else ""
        return await super().open(request)


MUTANTS = {"R01": ByTheBatch, "R02": Shared, "R03": OtherWhole, "R04": Impatient}


class Making(ParserFactory):
    def __init__(self, kind):
        self.kind = kind

    async def open(self, request):
        return self.kind()


def rules():
    kit = ParserConformance()
    return {name[5:8]: getattr(kit, name) for name, _ in inspect.getmembers(kit) if name.startswith("test_R")}


@pytest.mark.parametrize("rule", MUTANTS)
async def test_each_rule_catches_a_broken_parser(rule):
    Shared.shared = ToyParser()
    with pytest.raises(AssertionError):
        await rules()[rule](Making(MUTANTS[rule]), ANSWERS, BODY)


async def test_a_factory_that_keeps_what_nobody_uses_is_caught():
    with pytest.raises(Exception, match="not there"):
        await rules()["R05"](Leaking(ToyParserConfig(), make_context()), BODY)


def test_an_empty_delta_is_nothing_to_send():
    assert not ParsedDelta(reasoning_tokens=3)
    assert ParsedDelta("a")
