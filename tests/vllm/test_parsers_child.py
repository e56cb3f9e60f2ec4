"""vLLM's own parsers in their process: whatever the engine's cutting of its tokens, the same answer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import pytest_asyncio
import scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from pdhub_vllm.parser import VLLMParserFactory
from pdhub_vllm.parser_config import VLLMParserConfig
from pdhub_vllm.parser_derender import DerenderParser, Endpoints
from tokenizers import Tokenizer

from pdhub.api import Finished, FinishReason, ParseRequest, Piece, TokenChunk
from pdhub.router.presentation import Envelope, ParsedPresenter, load_text_decoder
from pdhub.testing import ParserConformance
from pdhub.testing.parser_kit import BODY, make_context

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = 2
WELL_FORMED = "ABCDEFIJK"  # of a broken call vLLM says other things in a stream than in a document
PAIRS = {
    "tags and JSON": {"reasoning": "deepseek_r1", "tools": "hermes"},
    "calls alone": {"tools": "hermes"},
    "parser engine": {"reasoning": "qwen3", "tools": "qwen3_coder"},
    "tags and parser engine": {"reasoning": "deepseek_r1", "tools": "glm47"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("said") / "model"
    scripted.write(directory)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(PAIRS))
async def parsers(request, model, vllm):
    """The process, ready."""
    import asyncio

    if request.param != "tags and JSON" and not request.config.getoption("--vllm-full"):
        pytest.skip("only in the full run")
    config = VLLMParserConfig(**PAIRS[request.param], via="child", python=str(vllm.parent / "python"))
    made = VLLMParserFactory(config, make_context(str(model)))
    await made.start()
    try:
        async with asyncio.timeout(300):
            while made.problem:
                assert "starting" in made.problem, made.problem
                await asyncio.sleep(0.1)
        yield made
    finally:
        await made.close()


class TestKit(ParserConformance):
    @pytest.fixture
    def factory(self, parsers):
        return parsers

    @pytest.fixture
    def answers(self, model):
        decoder = load_text_decoder(str(model))
        out = []
        for letter in WELL_FORMED:
            stream = decoder.stream(skip_special_tokens=False)
            pieces = [Piece(stream.push(i), (i,)) for i in _ids(model, letter)]
            out.append([*pieces, Piece("", (EOS,))])
        return out


@settings(deadline=None, max_examples=60)
@given(data=st.data())
async def test_any_cutting_gives_the_same_answer(parsers, model, data):
    ids = _ids(model, data.draw(st.sampled_from(sorted(scripted.SCRIPTS))))
    if data.draw(st.booleans()):
        extra = data.draw(st.lists(st.integers(3, 258), max_size=4))  # bytes, mostly of no character
        place = data.draw(st.integers(0, len(ids)))
        ids = [*ids[:place], *extra, *ids[place:]]
    ended = data.draw(st.booleans())
    body = {
        **BODY,
        "stream": True,
        "stop": data.draw(st.sampled_from([[], ["STOP"], ["</tool"], [" "]])),
        "include_reasoning": data.draw(st.booleans()),
    }
    cuts = data.draw(st.lists(st.integers(1, len(ids))) | st.just([]))
    one_by_one = await _answer(parsers, model, body, ids, range(len(ids)), ended)
    assert await _answer(parsers, model, body, ids, cuts, ended) == one_by_one


@settings(deadline=None, max_examples=60)
@given(data=st.data())
async def test_words_that_the_endpoint_parses_at_once_mean_the_same(parsers, model, data):
    """vLLM's own parsers, told their steps as the endpoint tells them; scripts with runs of words between the marks."""
    decoder = load_text_decoder(str(model))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = [i for text in ("answer is 42. ", " Here is", "call", "one\n") for i in tokenizer.encode(text).ids]
    ids: list[int] = []
    for token in _ids(model, data.draw(st.sampled_from(sorted(scripted.SCRIPTS)))):
        ids += data.draw(st.lists(st.sampled_from(words), max_size=4)) if data.draw(st.booleans()) else []
        ids.append(token)
    stream = decoder.stream(skip_special_tokens=False)
    answer = [*(Piece(stream.push(token), (token,)) for token in ids), Piece("", (EOS,))]
    one_by_one = await _parsed(parsers, [[piece] for piece in answer], lambda: 0.0)
    now = iter(itertools.count(0.0, data.draw(st.sampled_from([0.0, 0.1, 0.7]))))
    groups, rest = [], answer
    while rest:
        size = data.draw(st.integers(1, 9))
        groups, rest = [*groups, rest[:size]], rest[size:]
    assert await _parsed(parsers, groups, lambda: next(now)) == one_by_one


async def _parsed(factory, groups, clock) -> Any:
    """By a :class:`DerenderParser` whose endpoint is a new parser of the child for every call."""
    texts: dict[int, str] = {}

    async def ask(call) -> dict[str, Any]:
        body = dict(call.set)
        state = body["stream_state"] or {"ids": [], "lens": []}
        (choice,) = body["generate_chunk"]["choices"]
        fresh = await factory.open(ParseRequest({**BODY, "stream": True}, True))
        fresh.begin(body["prompt_token_ids"])
        rest, steps = list(state["ids"]), []
        for count in state["lens"]:
            chunk, rest = rest[:count], rest[count:]
            steps.append(Piece("".join(texts[i] for i in chunk), tuple(chunk)))
        if steps:
            await fresh.feed(steps, ended=False)
        ids = choice["token_ids"]
        last = Piece("".join(texts[i] for i in ids), tuple(ids))
        told = await fresh.feed([last], ended=choice["finish_reason"] is not None)
        fresh.close()
        calls = [
            {"index": c.index, "id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
            for c in told.tool_calls
        ]
        delta = {"content": told.content, "reasoning": told.reasoning, "tool_calls": calls}
        lens = [*state["lens"], len(ids)] if ids else state["lens"]
        return {"chunk": {"choices": [{"delta": delta}]}, "stream_state": {"ids": state["ids"] + ids, "lens": lens}}

    parser = DerenderParser(ParseRequest(BODY, True, "p", ask), Endpoints(), clock)
    parser.begin([5, 6])
    content = reasoning = ""
    named: dict[int, tuple[str, str]] = {}
    for place, group in enumerate(groups):
        for piece in group:
            texts.update(dict.fromkeys(piece.token_ids, piece.text))
        delta = await parser.feed(group, ended=place == len(groups) - 1)
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        for part in delta.tool_calls:
            name, arguments = named.get(part.index, ("", ""))
            named[part.index] = (name + (part.name or ""), arguments + part.arguments)
    return content, reasoning, named


async def _answer(factory, model, body: dict[str, Any], ids: list[int], cuts, ended: bool) -> Any:
    parser = await factory.open(ParseRequest(body, True))
    envelope = Envelope("id", "m", 0, (5, 6))
    presenter = ParsedPresenter(parser, load_text_decoder(str(model)), envelope, body=body, eos_token_ids={EOS})
    ids = [*ids, EOS] if ended else ids
    events = []
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    reason = FinishReason.STOP if ended else FinishReason.LENGTH
    items = [*(TokenChunk(tuple(ids[a:b])) for a, b in itertools.pairwise(edges)), Finished(reason, len(ids))]
    for item in items:
        events += await presenter.feed([item])
        if presenter.finished:
            break
    parser.close()
    return _heard([*events, *presenter.finish()]), presenter.usage()


def _heard(events: list[bytes]) -> Any:
    content = reasoning = ""
    names, arguments, finish = {}, {}, []
    for line in b"".join(events).decode().split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning") or ""
            finish += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                names.setdefault(call["index"], function.get("name"))
                arguments[call["index"]] = arguments.get(call["index"], "") + function.get("arguments", "")
    return content, reasoning, names, arguments, finish


def _ids(model, letter: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [tokenizer.token_to_id(word) for word in scripted.SCRIPTS[letter] if word != scripted.END]
