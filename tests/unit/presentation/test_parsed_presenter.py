"""Answers that a parser splits: the same whatever the engine's cutting, streamed or not, and as vLLM shapes them."""

import json
from collections import defaultdict

import pytest
from answers import EOS, chunk, engine, envelope
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import EngineFailed, Finished, FinishReason, ParsedDelta, ToolCallDelta
from pdhub.router.presentation import ParsedPresenter, TextDecoder
from pdhub.testing.toy_parser import ToyParser

TEXTS = [
    "<r>why not</r>because",
    'see <c:weather>{"city": "Köln"}</c>',
    "<c:time>{}</c><c:weather>{}</c> done",
    "<r>open",
    "plain <text",
    "",
    "<r></r><c:a></c>",
    "STOP <r>STOP</r> STOP",
]


def present(tokenizer, body, parser=None):
    return ParsedPresenter(
        parser or ToyParser(), TextDecoder(tokenizer), envelope(), body={"messages": [], **body}, eos_token_ids={EOS}
    )


async def drive(presenter, items, batch=1):
    """What a client reads, and the events."""
    events = []
    for n in range(0, len(items), batch):
        events += await presenter.feed(items[n : n + batch])
        if presenter.stopped:
            break
    assert presenter.finished
    if presenter.stream:
        return heard(events + presenter.finish())
    assert events == []
    document = json.loads(presenter.document())
    (choice,) = document["choices"]
    message = choice["message"]
    calls = {
        i: (c["function"]["name"], c["function"]["arguments"]) for i, c in enumerate(message.get("tool_calls", ()))
    }
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning") or "",
        "calls": calls,
        "finish": (choice["finish_reason"], choice["stop_reason"]),
        "logprobs": (choice["logprobs"] or {}).get("content", []),
        "token_ids": choice.get("token_ids", []),
        "usage": document["usage"],
    }


def heard(events):
    out = {"content": "", "reasoning": "", "calls": {}, "finish": None, "logprobs": [], "token_ids": [], "usage": None}
    names, arguments = {}, defaultdict(str)
    *lines, done, _ = b"".join(events).decode().split("\n\n")
    assert done == "data: [DONE]"
    for line in lines:
        document = json.loads(line.removeprefix("data: "))
        out["usage"] = document.get("usage", out["usage"])
        for choice in document["choices"]:
            assert out["finish"] is None
            delta = choice["delta"]
            out["content"] += delta.get("content", "")
            out["reasoning"] += delta.get("reasoning", "")
            out["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            out["token_ids"] += choice.get("token_ids", [])
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["type"] == "function"
                    names[call["index"]] = call["function"]["name"]
                arguments[call["index"]] += call["function"].get("arguments", "")
            if choice["finish_reason"] is not None:
                out["finish"] = (choice["finish_reason"], choice["stop_reason"])
    return {**out, "calls": {index: (name, arguments[index]) for index, name in names.items()}}


@settings(deadline=None, max_examples=120)
@given(data=st.data())
async def test_any_cutting_gives_the_same_answer(bytelevel, data):
    ids = bytelevel.encode(data.draw(st.sampled_from(TEXTS))).ids
    if data.draw(st.booleans()):
        ids.append(EOS)
    body = {
        "stop": data.draw(st.sampled_from([[], ["STOP"], ["</r>", "c:"], ["er"]])),
        "include_stop_str_in_output": data.draw(st.booleans()),
        "include_reasoning": data.draw(st.booleans()),
        "return_token_ids": data.draw(st.booleans()),
        "logprobs": data.draw(st.booleans()),
    }
    cuts = data.draw(st.lists(st.integers(1, 30)) | st.just(list(range(31))))
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    limit = data.draw(st.sampled_from([10_000, 3]))
    told = [
        await drive(present(bytelevel, asked), engine(ids, asked, limit, cuts=where), batch)
        for asked in (body, streamed)
        for where, batch in (((), 1), (cuts, 1), (cuts, data.draw(st.integers(1, 4))))
    ]
    first, rest = told[0], told[1:]
    for one in rest:
        # A call is the reason for which an answer that is not streamed ended, even one that was cut; as in vLLM.
        if one["finish"] != first["finish"]:
            assert (first["finish"][0], one["finish"][0]) == ("tool_calls", "length")
        assert {**one, "finish": None} == {**first, "finish": None}
    if not body["include_reasoning"]:
        assert not first["reasoning"]
        assert not first["logprobs"]
        assert not first["token_ids"]


@pytest.mark.parametrize(
    ("choice", "stream", "reason"),
    [
        ("auto", True, "tool_calls"),
        ("auto", False, "tool_calls"),
        ("required", True, "tool_calls"),
        ("required", False, "tool_calls"),
        ({"type": "function", "function": {"name": "a"}}, True, "stop"),
        ({"type": "function", "function": {"name": "a"}}, False, "stop"),
    ],
)
async def test_why_an_answer_with_a_call_ended(bytelevel, choice, stream, reason):
    body = {"stream": stream, "tool_choice": choice}
    ids = [*bytelevel.encode("<c:a>{}</c>").ids, EOS]
    assert (await drive(present(bytelevel, body), engine(ids, body)))["finish"] == (reason, None)


async def test_events_of_a_stream(bytelevel):
    body = {"stream": True}
    presenter = present(bytelevel, body)
    items = engine([*bytelevel.encode("<r>a</r>").ids, EOS], body, cuts=range(99))
    events = [event for item in items for event in await presenter.feed([item])] + presenter.finish()
    deltas = [json.loads(e.removeprefix(b"data: "))["choices"][0]["delta"] for e in events if b"[DONE]" not in e]
    assert deltas == [{"role": "assistant", "content": ""}, {"reasoning": "a"}, {}], "marks make no events"


async def test_usage_tells_the_reasoning(bytelevel):
    body = {"stream": False}
    read = await drive(present(bytelevel, body), engine(bytelevel.encode("<r>ab</r>c").ids, body))
    assert read["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_special_tokens_come_to_a_parser_that_wants_them(bytelevel):
    class Keeping(ToyParser):
        keeps_special_tokens = True

    start = bytelevel.token_to_id("<|start|>")
    for parser, text in ((Keeping(), "<|start|>"), (ToyParser(), "")):
        body = {"stream": False}
        read = await drive(present(bytelevel, body, parser), engine([start, EOS], body))
        assert read["content"] == text


async def test_a_parser_gets_the_prompt_and_every_token(bytelevel):
    class Noting(ToyParser):
        prompt, ids, ends = (), (), 0

        def begin(self, prompt_token_ids):
            self.prompt = tuple(prompt_token_ids)

        async def feed(self, pieces, *, ended):
            assert pieces
            self.ids += tuple(i for piece in pieces for i in piece.token_ids)
            self.ends += ended
            return ParsedDelta(tool_calls=(ToolCallDelta(0, "x", "y"),) if ended else ())

    for tail in ([EOS], []):
        parser, body = Noting(), {"stream": True}
        ids = [*bytelevel.encode("Hello 你").ids, *tail]
        await drive(present(bytelevel, body, parser), engine(ids, body, cuts=[2]))
        assert (parser.prompt, parser.ids, parser.ends) == ((5, 6, 7), tuple(ids), 1)


async def test_an_unfinished_answer_has_no_end(bytelevel):
    presenter = present(bytelevel, {"stream": True})
    await presenter.feed([chunk(40)])
    with pytest.raises(RuntimeError, match="not ended"):
        presenter.finish()
    with pytest.raises(EngineFailed, match="counted"):
        await presenter.feed([Finished(FinishReason.LENGTH, 7)])
