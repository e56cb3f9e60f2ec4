"""The process that runs vLLM's parsers, on a stand-in for vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time

import pytest
import stub_vllm
from pdhub_vllm.parser import VLLMParserFactory
from pdhub_vllm.parser_config import VLLMParserConfig

from pdhub.api import (
    AdmissionRejected,
    InvalidRequest,
    ParserContext,
    ParseRequest,
    ParserFailed,
    Piece,
    Topology,
)

TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A Python with the stand-in, and a tokenizer's directory."""
    stub_vllm.write(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "m", "architectures": ["M"]}))
    return tmp_path


@pytest.fixture
async def start(machine):
    started = []

    async def make(changed=lambda: None, **options):
        config = VLLMParserConfig(**{"reasoning": "deepseek_r1", "tools": "hermes", "via": "child", **options})
        context = ParserContext("m", str(machine / "model"), Topology("m", None, (), "shm"), changed)
        factory = VLLMParserFactory(config.model_copy(update={"python": sys.executable}), context)
        await factory.start()
        started.append(factory)
        return factory

    yield make
    for factory in started:
        await factory.close()


async def ready(factory, problem=""):
    deadline = time.monotonic() + 60
    while (factory.problem != "") if problem == "" else (problem not in factory.problem):
        assert time.monotonic() < deadline, factory.problem
        await asyncio.sleep(0.01)


async def feed_on(parser):
    for _ in range(1000):
        await parser.feed([Piece("a")], ended=False)
        await asyncio.sleep(0.01)


def asking(stream=True, **members):
    return ParseRequest({"messages": [{"role": "user", "content": "x"}], "stream": stream, **members}, stream)


async def test_deltas_and_wholes(start):
    factory = await start(chat_template_kwargs={"a": 1})
    assert "starting" in factory.problem
    await ready(factory)
    parser = await factory.open(asking(tools=TOOLS, chat_template_kwargs={"b": 2}))
    assert parser.keeps_special_tokens
    parser.begin([1, 2])
    first = await parser.feed([Piece("one", (5,)), Piece("call", (6,)), Piece("args"), Piece("args")], ended=False)
    assert first.content == "one"
    assert [(c.index, c.id, c.name, c.arguments) for c in first.tool_calls] == [
        (0, "id-0", "f", ""), (1, "id-1", "f", ""), (0, None, None, "{}{}"),
    ]  # fmt: skip
    assert first.reasoning_tokens is None, "counted at the end"
    last = await parser.feed([Piece("two", (7,))], ended=True)
    assert (last.content, last.reasoning, last.reasoning_tokens) == ("two", "<[1, 2]{'a': 1, 'b': 2}>", 3)
    parser.close()
    plain = await factory.open(asking(stream=False))
    assert not plain.keeps_special_tokens
    plain.begin([99])
    message = await plain.whole([Piece("a", (1,)), Piece("call", (2,))])
    assert (message.content, message.reasoning, message.tool_calls) == ("a", "open", ())
    single = await factory.open(asking(stream=False, tools=TOOLS, parallel_tool_calls=False))
    assert [c.id for c in (await single.whole([Piece("callcall")])).tool_calls] == ["made"]


async def test_what_is_wrong_with_the_request_is_its_fault_and_what_fails_is_not(start):
    factory = await start()
    await ready(factory)
    with pytest.raises(InvalidRequest, match="something else"):
        await factory.open(asking(tool_choice="perhaps"))
    parser = await factory.open(asking())
    with pytest.raises(ParserFailed):
        await parser.feed([Piece("raise")], ended=False)
    assert not factory.problem, "the others go on"


async def test_its_death_is_told_to_whoever_waits_and_the_next_one_knows_nothing(start):
    told = []
    factory = await start(lambda: told.append(factory.problem))
    await ready(factory)
    waiting, bystander = await factory.open(asking()), await factory.open(asking())
    with pytest.raises(ParserFailed, match="died"):
        await waiting.feed([Piece("die")], ended=False)
    await ready(factory, "ended")
    with pytest.raises(ParserFailed, match="went away"):
        await factory.open(asking())
    await ready(factory)
    with pytest.raises(ParserFailed, match="went away"):
        await bystander.feed([Piece("a")], ended=False)
    bystander.close()
    again = await factory.open(asking())
    assert (await again.feed([Piece("a")], ended=False)).content == "a"
    assert [bool(problem) for problem in told] == [False, True, False]


async def test_a_kill_between_two_steps_is_noticed(start):
    factory = await start()
    await ready(factory)
    parser = await factory.open(asking())
    os.kill(factory._process._process.pid, signal.SIGKILL)
    with pytest.raises(ParserFailed):
        await feed_on(parser)
    await ready(factory)


async def test_one_that_hangs_is_ended(start):
    factory = await start(within_s=0.5)
    await ready(factory)
    parser = await factory.open(asking())
    with pytest.raises(ParserFailed, match="does not answer"):
        await parser.feed([Piece("hang")], ended=False)
    await ready(factory, "ended")
    await ready(factory)


async def test_the_queue_is_bounded(start):
    factory = await start(queue=1)
    await ready(factory)
    parser = await factory.open(asking())
    slow = asyncio.create_task(parser.feed([Piece("hang")], ended=False))
    while not factory._process.full:
        await asyncio.sleep(0.01)
    with pytest.raises(AdmissionRejected) as refused:
        await factory.open(asking())
    assert refused.value.contended
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


async def test_one_that_cannot_start_says_why(start):
    factory = await start(reasoning="broken")
    await ready(factory, "tokenizer does not fit")


async def test_nothing_is_left_behind(start):
    factory = await start()
    await ready(factory)
    pid = factory._process._process.pid
    await factory.close()
    await factory.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_parser_of_calls_alone_sees_only_what_may_have_some(start):
    both, calls = await start(), await start(reasoning=None)
    offered = {"tools": TOOLS}
    for body, wanted in (({}, False), (offered, True), ({**offered, "tool_choice": "none"}, False)):
        assert both.wanted(body)
        assert calls.wanted(body) is wanted
