"""Parsing by the prefill instance, and which answers go there."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdhub_vllm.parser import VLLMParserFactory
from pdhub_vllm.parser_config import VLLMParserConfig
from pdhub_vllm.parser_derender import LONGEST_S, PATH, REST, DerenderParser, Endpoints

from pdhub.api import (
    EngineFailed,
    InvalidRequest,
    ParserContext,
    ParseRequest,
    ParserFailed,
    Piece,
    Topology,
    Unsupported,
)


class Instance:
    """Answers as vLLM's endpoint; what it is asked is in ``asked``."""

    def __init__(self, state="on"):
        self.state = state
        self.asked = []

    async def ask(self, call):
        assert (call.method, call.path) == ("POST", PATH)
        body = dict(call.set)
        self.asked.append(body)
        if self.state == "off":
            raise InvalidRequest("Scale-out endpoints are disabled")
        if self.state == "gone":
            raise EngineFailed("nobody there")
        if "chat_request" not in body:
            if self.state == "on":
                raise InvalidRequest("chat_request is required when a tool or reasoning parser is configured")
            return {"choices": []}
        if body.get("stream"):
            (choice,) = body["generate_chunk"]["choices"]
            text = "".join(map(str, choice["token_ids"]))
            delta = {
                "content": text,
                "tool_calls": [{"index": 0, "id": "i", "function": {"name": "f"}}] if text == "7" else [],
            }
            return {"chunk": {"choices": [{"delta": delta}]}, "stream_state": {"seen": text}}
        (choice,) = body["generate_response"]["choices"]
        call_ = {"id": "i", "function": {"name": "f", "arguments": "{}"}}
        return {
            "choices": [{"message": {"content": str(choice["token_ids"]), "reasoning": "r", "tool_calls": [call_] * 2}}]
        }


def factory(tmp_path, via="derender"):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    context = ParserContext("m", str(tmp_path), Topology("m", None, (), "shm"))
    return VLLMParserFactory(VLLMParserConfig(tools="hermes", via=via), context)


def asking(instance, stream=False, **members):
    body = {"messages": [{"role": "user", "content": "x"}], **members}
    return ParseRequest(body, stream, "prefill-0", None if instance is None else instance.ask)


async def test_streams_go_token_by_token_and_the_end_is_no_text(tmp_path):
    instance = Instance()
    parser = await factory(tmp_path).open(asking(instance, stream=True))
    assert isinstance(parser, DerenderParser)
    parser.begin([1, 2])
    delta = await parser.feed([Piece("<", (5,)), Piece("[", (7,))], ended=False)
    assert (delta.content, [(c.index, c.id, c.name) for c in delta.tool_calls]) == ("57", [(0, "i", "f")])
    await parser.feed([Piece("", (9,))], ended=True)
    chunks = [body["generate_chunk"]["choices"][0] for body in instance.asked[1:]]
    assert [(c["token_ids"], c["finish_reason"]) for c in chunks] == [([5], None), ([7], None), ([], "stop")]
    assert [body["stream_state"] for body in instance.asked[1:]] == [None, {"seen": "5"}, {"seen": "7"}]
    assert all(body["prompt_token_ids"] == [1, 2] for body in instance.asked[1:])


async def test_whole_answers(tmp_path):
    instance = Instance()
    for members, calls in (({}, 2), ({"parallel_tool_calls": False}, 1)):
        parser = await factory(tmp_path).open(asking(instance, **members))
        parser.begin([1])
        message = await parser.whole([Piece("a", (5,)), Piece("", (6,)), Piece("b", (7,)), Piece("", (2,))])
        assert (message.content, message.reasoning, len(message.tool_calls)) == ("[5, 6, 7]", "r", calls)
    assert (await parser.whole([Piece("", (2,))])).content == "", "an answer of nothing is not worth a call"


@pytest.mark.parametrize("state", ["off", "without", "gone"])
async def test_an_instance_that_does_not_parse_is_refused_before_prefill(tmp_path, state):
    instance, made = Instance(state), factory(tmp_path)
    for _ in range(3):
        with pytest.raises(Unsupported):
            await made.open(asking(instance))
    assert len(instance.asked) == 1, "it is not asked for every request"


async def test_stop_strings_and_hosted_instances_are_not_for_it(tmp_path):
    with pytest.raises(Unsupported):
        await factory(tmp_path).open(asking(Instance(), stop=["x"]))
    with pytest.raises(Unsupported):
        await factory(tmp_path).open(asking(None))


async def test_auto_leaves_streams_to_the_process(tmp_path):
    made, instance = factory(tmp_path, "auto"), Instance()
    assert isinstance(await made.open(asking(instance)), DerenderParser)
    with pytest.raises(ParserFailed, match="went away"):  # it was never started
        await made.open(asking(instance, stream=True))
    await made.close()


async def test_one_that_stops_parsing_is_asked_again(tmp_path):
    instance, made = Instance(), factory(tmp_path)
    parser = await made.open(asking(instance))
    parser.begin([])
    instance.state = "gone"
    with pytest.raises(ParserFailed):
        await parser.whole([Piece("a", (5,))])
    with pytest.raises(Unsupported):
        await made.open(asking(instance))


class Marks:
    """A parser as vLLM's are: told step by step, it holds what may be a mark's beginning, shows a mark that comes among
    other text of one step as text, and splits reasoning off at a phrase."""

    THINK, CALL, ENDED, PHRASE = "<think>", "<call>", "</call>", "So I say:"

    def __init__(self):
        self.held, self.kind, self.calls = "", "content", 0

    def step(self, text, finished):
        delta = {"content": "", "reasoning": "", "tool_calls": []}
        if any(mark in text and text != mark for mark in (self.THINK, self.CALL, self.ENDED)):
            delta[self.kind if self.kind != "call" else "content"] += self.held + text
            self.held = ""
            return delta
        text, self.held = self.held + text, ""
        mark = next((m for m in (self.THINK, self.CALL, self.ENDED) if text.endswith(m)), None)
        if mark is not None:
            self._show(delta, text.removesuffix(mark))
            self.kind = {self.THINK: "reasoning", self.CALL: "call", self.ENDED: "content"}[mark]
            if mark == self.CALL:
                self.calls += 1
                call = {"index": self.calls - 1, "id": f"i{self.calls}", "function": {"name": "f", "arguments": ""}}
                delta["tool_calls"].append(call)
            return delta
        if self.kind == "reasoning" and self.PHRASE in text:
            before, _, after = text.partition(self.PHRASE)
            self._show(delta, before)
            self.kind, text = "content", after
        starts = (self.THINK, self.CALL, self.ENDED, self.PHRASE)
        keep = max((n for m in starts for n in range(1, len(m)) if text.endswith(m[:n])), default=0)
        if keep and not finished:
            text, self.held = text[:-keep], text[-keep:]
        self._show(delta, text)
        return delta

    def _show(self, delta, text):
        if self.kind != "call":
            delta[self.kind] += text
        elif text:
            delta["tool_calls"].append({"index": self.calls - 1, "function": {"arguments": text}})


class Replaying:
    """As vLLM's endpoint: with every call a new parser is told all steps again. ``texts``: of the tokens by their ids.
    ``cost_s``: of one token that is parsed."""

    def __init__(self, texts, cost_s=0.0):
        self.texts, self.cost_s, self.now = texts, cost_s, 0.0
        self.calls = self.steps = self.tokens = 0

    def clock(self):
        return self.now

    async def ask(self, call):
        body = dict(call.set)
        state = body["stream_state"] or {"ids": [], "lens": []}
        (choice,) = body["generate_chunk"]["choices"]
        parser, rest = Marks(), list(state["ids"])
        for count in state["lens"]:
            chunk, rest = rest[:count], rest[count:]
            parser.step(self._text(chunk), False)
        ids = choice["token_ids"]
        delta = parser.step(self._text(ids), choice["finish_reason"] is not None)
        self.calls += 1
        self.steps += len(state["lens"]) + 1
        self.tokens += len(state["ids"]) + len(ids)
        self.now += self.cost_s * (len(state["ids"]) + len(ids))
        lens = [*state["lens"], len(ids)] if ids else state["lens"]
        return {"chunk": {"choices": [{"delta": delta}]}, "stream_state": {"ids": state["ids"] + ids, "lens": lens}}

    def _text(self, ids):
        return "".join(self.texts[i] for i in ids)


def opened(endpoint):
    body = {"messages": [{"role": "user", "content": "x"}]}
    parser = DerenderParser(ParseRequest(body, True, "prefill-0", endpoint.ask), Endpoints(), endpoint.clock)
    parser.begin([1, 2])
    return parser


def meaning(deltas):
    arguments = {}
    for call in itertools.chain.from_iterable(delta.tool_calls for delta in deltas):
        known = arguments.get(call.index, ("", "", ""))
        arguments[call.index] = (known[0] + (call.id or ""), known[1] + (call.name or ""), known[2] + call.arguments)
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), arguments


async def read(texts, cuts, cost_s=0.0, ended=True):
    """What an answer means, and the endpoint. ``cuts``: how many pieces come at once, and seconds until they do."""
    endpoint = Replaying(texts, cost_s)
    parser, pieces = opened(endpoint), [Piece(text, (i,)) for i, text in enumerate(texts)]
    told, place = [], 0
    for count, seconds in itertools.chain(cuts, itertools.repeat((1, 0.0))):
        if place >= len(pieces):
            break
        endpoint.now += seconds
        part = pieces[place : place + count]
        place += count
        told.append(await parser.feed(part, ended=ended and place >= len(pieces)))
    return meaning(told), endpoint


WORDS = ("one ", "two", " So", " I", " say:", " ", "\n", "a < b", "(c)", "é", '"')
SPLIT = ("<", "think", ">", "<call", "<call>", "</call>", "<think>", "So I ", "say:")


@settings(deadline=None, max_examples=300)
@given(
    texts=st.lists(st.sampled_from(WORDS + SPLIT), min_size=1, max_size=40),
    cuts=st.lists(st.tuples(st.integers(1, 9), st.floats(0, 2)), max_size=20),
    cost_s=st.sampled_from([0.0, 0.001, 0.1]),
    end=st.sampled_from(["", " there"]),
)
async def test_however_tokens_come_and_however_long_it_takes_the_answer_is_that_of_one_by_one(texts, cuts, cost_s, end):
    texts = [*texts, end]
    one_by_one = []
    parser = Marks()
    for place, text in enumerate(texts):
        delta = parser.step(text, place == len(texts) - 1)
        one_by_one.append(delta)
    found, _ = await read(texts, cuts, cost_s)
    assert found[0] == "".join(delta["content"] for delta in one_by_one)
    assert found[1] == "".join(delta["reasoning"] for delta in one_by_one)
    arguments = {}
    for call in itertools.chain.from_iterable(delta["tool_calls"] for delta in one_by_one):
        arguments[call["index"]] = arguments.get(call["index"], "") + call["function"].get("arguments", "")
    assert {index: call[2] for index, call in found[2].items()} == arguments
    assert all(call[:2] == (f"i{index + 1}", "f") for index, call in found[2].items()), "id and name come once"


async def test_an_answer_of_words_costs_what_its_length_says():
    """A hundred tokens a second, and a tenth of a millisecond for each that is parsed."""
    spent = {}
    for length in (1000, 2000, 4000):
        texts = [*(f"word{n} " for n in range(length - 1)), ""]
        found, endpoint = await read(texts, [(1, 0.01)] * length, cost_s=0.0001)
        assert found[0] == "".join(texts)
        spent[length] = endpoint.tokens
        assert endpoint.calls < length
        assert endpoint.tokens * 0.0001 < 0.01 * length / (1 + REST) * 1.5, "a share of the answer's own time"
    assert spent[4000] < 2.5 * spent[2000] < 6.25 * spent[1000], "not the square"


async def test_words_that_wait_come_when_the_endpoint_has_rested_or_the_answer_ends():
    endpoint = Replaying(["a ", "b ", "c ", "d ", "e ", ""], cost_s=0.2)
    parser = opened(endpoint)
    pieces = [Piece(text, (i,)) for i, text in enumerate(endpoint.texts)]
    assert (await parser.feed(pieces[:1], ended=False)).content == "a "
    assert (await parser.feed(pieces[1:2], ended=False)).content == ""
    endpoint.now += REST * 0.2
    assert (await parser.feed(pieces[2:3], ended=False)).content == "b c "
    assert (await parser.feed(pieces[3:4], ended=False)).content == ""
    endpoint.now += LONGEST_S
    assert (await parser.feed(pieces[4:5], ended=False)).content == "d e "
    assert (await parser.feed(pieces[5:], ended=True)).content == ""
    assert endpoint.calls == 4


async def test_a_mark_does_not_wait():
    texts = ["a ", "b ", "<call>", "x", "y", "</call>", ""]
    found, endpoint = await read(texts, [(1, 0.0)] * 7, cost_s=5.0)
    assert found == ("a b ", "", {0: ("i1", "f", "xy")})
    assert endpoint.calls == 7


async def test_a_run_that_means_more_than_it_says_is_parsed_token_by_token():
    texts = ["<think>", "hm ", "well ", "So I ", "say:", " yes ", "and ", "on", ""]
    found, endpoint = await read(texts, [(2, 0.0), (6, 0.0), (1, 0.0)])
    assert found == (" yes and on", "hm well ", {})
    assert endpoint.calls > len(texts), "the run was parsed twice"
    assert re.fullmatch("[a-z ]*", found[0])
