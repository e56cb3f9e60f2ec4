"""Parsing by the prefill instance, and which answers go there."""

from __future__ import annotations

import pytest
from pdhub_vllm.parser import VLLMParserFactory
from pdhub_vllm.parser_config import VLLMParserConfig
from pdhub_vllm.parser_derender import PATH, DerenderParser

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
    delta = await parser.feed([Piece("5", (5,)), Piece("7", (7,))], ended=False)
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
