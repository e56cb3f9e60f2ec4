"""A parser in front of pools that speak tokens: who gets which request, and what a client sees when it fails."""

import asyncio
import json

import pytest

from pdhub.router.parsing import Parsing
from pdhub.testing import toy, toy_parser
from pdhub.testing.hub import MODEL, toy_topology

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
OPTIONS = {"slots": 4}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
PARSER = {"type": "toy"}


def configured(parser=None, **model):
    topology = toy_topology(fast=OPTIONS, general=OPTIONS, prefill=OPTIONS)
    topology["model"] |= {"parser": parser, **model} if parser else model
    return topology


def asking(**members):
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, **members}


async def start(hub, topology):
    return await hub.start(topology, plugins=[toy, toy_parser])


def factory(running):
    parsing = running.router.context.parsing
    assert isinstance(parsing, Parsing)
    return parsing._factory


async def test_without_a_parser_tools_are_refused_before_any_prefill(hub):
    running = await start(hub, configured())
    for stream in (False, True):
        reply = await running.post(CHAT, asking(tools=TOOLS, stream=stream))
        assert reply.status == 400
        assert reply.error["code"] == "unsupported"
        assert reply.error["param"] == "tools"
    for members in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        assert (await running.post(CHAT, asking(**members))).status == 200, "what needs no parser is served"
    assert await running.leaks() == {}


async def test_with_one_the_answer_is_parsed(hub):
    running = await start(hub, configured(PARSER))
    plain = await running.post(CHAT, asking())
    for stream in (False, True):
        reply = await running.post(CHAT, asking(tools=TOOLS, stream=stream, stream_options=None))
        assert reply.status == 200, reply.body
        assert reply.text == plain.text
    assert plain.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    completion = await running.complete("hi", max_tokens=4)
    assert "completion_tokens_details" not in completion.json["usage"], "completions are not parsed"


async def test_a_forced_or_strict_call_needs_a_grammar_too(hub):
    running = await start(hub, configured(PARSER))
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    named = {"type": "function", "function": {"name": "weather"}}
    for members in (
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": named},
        {"tools": strict},
    ):
        reply = await running.post(CHAT, asking(**members))
        assert (reply.status, reply.error["code"]) == (400, "unsupported")
    assert (await running.post(CHAT, asking(tools=TOOLS, tool_choice="auto"))).status == 200


async def test_a_model_that_reasons_is_not_served_where_nobody_splits_it(hub):
    running = await start(hub, configured(reasoning=True))
    reply = await running.post(CHAT, asking())
    assert (reply.status, reply.error["code"]) == (400, "unsupported")
    assert (await running.complete("hi", max_tokens=4)).status == 200


async def test_while_the_parser_is_away_what_needs_it_is_told_to_come_again(hub):
    running = await start(hub, configured(PARSER, reasoning=False))
    factory(running).set_problem("is starting")
    reply = await running.post(CHAT, asking(tools=TOOLS))
    assert (reply.status, reply.error["code"]) == (503, "no_endpoints")
    assert "retry-after" in {name.lower() for name in reply.headers}
    async with running.http.get(f"{running.url}/ready") as ready:
        assert "parser: is starting" in (await ready.json())["problems"]
    assert (await running.complete("hi", max_tokens=4)).status == 200
    factory(running).set_problem("")
    assert (await running.post(CHAT, asking(tools=TOOLS))).status == 200
    assert await running.leaks() == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_parser_that_dies_is_an_error_and_no_half_answer(hub, stream):
    text = (await (await start(hub, configured())).post(CHAT, asking())).text
    running = await start(hub, configured({"type": "toy", "config": {"dies_at": text[5]}}))
    reply = await running.post(CHAT, asking(stream=stream))
    assert reply.error["code"] == "parser_failed"
    if stream:
        assert not reply.done, "no end mark behind an error"
        assert reply.text == text[: text.index(text[5])]
    else:
        assert reply.status == 502
    nodes = running.router.context.fleet.pools["general"].nodes.values()
    assert all(node.usable(running.router.context.clock()) for node in nodes), "the node is not to blame"
    assert await running.leaks() == {}


async def test_explain_knows_what_the_parser_can(hub):
    running = await start(hub, configured(PARSER))
    body = json.dumps(asking(tools=TOOLS)).encode()
    for problem, node in (("", "general-0"), ("is away", None)):
        factory(running).set_problem(problem)
        assert (await running.post("/explain", body)).json["node"] == node


async def test_many_at_once_do_not_mix(hub):
    running = await start(hub, configured(PARSER))
    bodies = [asking(messages=[{"role": "user", "content": f"number {n}"}]) for n in range(12)]
    alone = [(await running.post(CHAT, body)).text for body in bodies]
    together = await asyncio.gather(*(running.post(CHAT, {**body, "stream": True}) for body in bodies))
    assert [reply.text for reply in together] == alone
