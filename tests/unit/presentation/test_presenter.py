"""The shapes of answers, member by member."""

import json

import pytest
from answers import CHAT, COMPLETIONS, EOS, PROMPT, answer, chunk, engine, present

from pdhub.api import EngineFailed, Finished, FinishReason, InvalidRequest, TokenChunk, TokenLogprob

BOTH = pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])


@pytest.fixture
def ids(bytelevel):
    return bytelevel.encode("Hello world, 你好 😀").ids


def test_a_chat_stream(bytelevel, ids):
    read = answer(present(bytelevel, {"stream": True}), engine([*ids, EOS], {}))
    first, *middle, last = read.chunks
    envelope = {"id": "id-1", "object": "chat.completion.chunk", "created": 7, "model": "m"}
    assert first == envelope | {
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
    }
    for event in middle:
        assert event == envelope | {
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": event["choices"][0]["delta"]["content"]},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ]
        }
    assert last == envelope | {
        "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    }
    assert read.text == "Hello world, 你好 😀"


def test_a_completions_stream(bytelevel, ids):
    read = answer(present(bytelevel, {"stream": True}, COMPLETIONS), engine(ids, {}))
    envelope = {"id": "id-1", "object": "text_completion", "created": 7, "model": "m"}
    assert all(event["choices"][0].keys() >= {"index", "text", "logprobs", "finish_reason"} for event in read.chunks)
    assert all(envelope.items() <= event.items() for event in read.chunks)
    assert (read.text, read.finish) == ("Hello world, 你好 😀", ["length"])


def test_documents(bytelevel, ids):
    chat = json.loads(_document(present(bytelevel, {}, cached_tokens=2), engine([*ids, EOS], {})))
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": len(ids) + 1,
        "total_tokens": len(ids) + 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    text = "Hello world, 你好 😀"
    ending = {"logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert chat == {
        "id": "id-1", "object": "chat.completion", "created": 7, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, **ending}], "usage": usage,
    }  # fmt: skip
    completion = json.loads(_document(present(bytelevel, {}, COMPLETIONS), engine([*ids, EOS], {})))
    del usage["prompt_tokens_details"]
    assert completion == {
        "id": "id-1", "object": "text_completion", "created": 7, "model": "m",
        "choices": [{"index": 0, "text": text, **ending}], "usage": usage,
    }  # fmt: skip


def _document(presenter, items):
    assert presenter.feed(items) == []
    return presenter.document()


@BOTH
@pytest.mark.parametrize("asked", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_comes_once_and_only_if_asked_for(bytelevel, ids, endpoint, asked):
    read = answer(present(bytelevel, {"stream": True, "stream_options": asked}, endpoint), engine(ids, {}))
    if not (asked and asked.get("include_usage")):
        assert read.usage == []
        return
    assert read.chunks[-1]["choices"] == []
    assert read.usage == [{"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": len(ids) + 3}]


@BOTH
def test_usage_in_every_chunk(bytelevel, ids, endpoint):
    options = {"include_usage": True, "continuous_usage_stats": True}
    read = answer(present(bytelevel, {"stream": True, "stream_options": options}, endpoint), engine(ids, {}))
    assert len(read.usage) == len(read.chunks)
    counts = [usage["completion_tokens"] for usage in read.usage]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids)


@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_ends_at_once_is_empty(bytelevel, endpoint, stream):
    read = answer(present(bytelevel, {"stream": stream}, endpoint), engine([EOS], {}))
    assert (read.text, read.finish, read.stop_reason) == ("", ["stop"], None)


def test_an_answer_without_a_token_still_opens_and_ends(bytelevel):
    read = answer(present(bytelevel, {"stream": True}), [Finished(FinishReason.LENGTH, 0)])
    assert (len(read.chunks), read.text, read.finish) == (2, "", ["length"])


def test_nothing_is_sent_before_something_came(bytelevel, ids):
    presenter = present(bytelevel, {"stream": True})
    assert presenter.feed([]) == []
    assert len(presenter.feed([chunk(ids[0])])) == 2
    assert len(presenter.feed([chunk(ids[1]), chunk(ids[2])])) == 1


@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_cuts_the_text_and_stops_the_engine(bytelevel, endpoint, stream):
    ids = bytelevel.encode("Hello STOP world").ids
    presenter = present(bytelevel, {"stream": stream, "stop": "STOP"}, endpoint)
    read = answer(presenter, engine(ids, {}, cuts=range(99)))
    assert presenter.stopped
    assert (read.text, read.finish, read.stop_reason) == ("Hello ", ["stop"], "STOP")
    assert presenter.completion_tokens == len(bytelevel.encode("Hello STOP").ids) < len(ids)


def test_tokens_after_a_stop_string_in_one_chunk_do_not_count(bytelevel):
    ids = bytelevel.encode("Hello STOP world").ids
    presenter = present(bytelevel, {"stop": ["STOP"]})
    assert presenter.feed([chunk(*ids), Finished(FinishReason.LENGTH, len(ids))]) == []
    assert presenter.completion_tokens == len(bytelevel.encode("Hello STOP").ids)
    assert presenter.feed([chunk(9, 9)]) == []
    assert json.loads(presenter.document())["choices"][0]["message"]["content"] == "Hello "


def test_the_stop_string_may_be_shown(bytelevel):
    ids = bytelevel.encode("Hello STOP world").ids
    body = {"stop": ["STOP"], "include_stop_str_in_output": True}
    assert answer(present(bytelevel, body), engine(ids, body)).text == "Hello STOP"


def test_a_stop_id_hides_its_text_and_is_named(bytelevel):
    ids = bytelevel.encode("Hello world").ids
    body = {"stop_token_ids": [ids[-1]]}
    read = answer(present(bytelevel, body), engine(ids, body))
    assert read.text == bytelevel.decode(ids[:-1])
    assert (read.finish, read.stop_reason) == (["stop"], ids[-1])
    body["include_stop_str_in_output"] = True
    assert answer(present(bytelevel, body), engine(ids, body)).text == "Hello world"


@pytest.mark.parametrize("stream", [True, False])
def test_an_ender_that_did_not_end_it_is_text(bytelevel, stream):
    a, b = bytelevel.encode("a").ids[0], bytelevel.encode("b").ids[0]
    body = {"stop_token_ids": [a], "min_tokens": 2, "stream": stream}
    read = answer(present(bytelevel, body), engine([a, b, a, b, a], body, cuts=range(9)))
    assert (read.text, read.stop_reason) == ("ab", a)
    body = {"stop_token_ids": [a], "min_tokens": 2, "stream": stream}
    read = answer(present(bytelevel, body), engine([b, a], body, cuts=range(9)))
    assert (read.text, read.finish) == ("ba", ["length"])


def test_end_of_sequence_is_hidden_even_among_visible_special_tokens(bytelevel, ids):
    body = {"skip_special_tokens": False}
    assert answer(present(bytelevel, body), engine([0, *ids, EOS], body)).text == "<|start|>Hello world, 你好 😀"
    body["ignore_eos"] = True
    ids = [*ids, EOS, *ids]
    assert answer(present(bytelevel, body), engine(ids, body)).text == bytelevel.decode(ids, skip_special_tokens=False)


def test_a_half_character_at_the_limit_is_no_text(bytelevel):
    ids = bytelevel.encode("a🦊").ids[:-1]
    for stream in (True, False):
        assert answer(present(bytelevel, {"stream": stream}), engine(ids, {})).text == "a"


@pytest.mark.parametrize("stream", [True, False])
def test_chat_logprobs(bytelevel, ids, stream):
    body = {"stream": stream, "logprobs": True, "top_logprobs": 2}
    read = answer(present(bytelevel, body), engine([*ids, EOS], body, cuts=range(99)))
    assert len(read.logprobs) == len(ids) + 1
    assert b"".join(bytes(entry["bytes"]) for entry in read.logprobs) == ("Hello world, 你好 😀" + "<|end|>").encode()
    first = read.logprobs[0]
    assert first["logprob"] == -ids[0] / 8
    assert [top["logprob"] for top in first["top_logprobs"]] == [-ids[0] / 8, -0.5], "itself, then the best"
    assert first["top_logprobs"][0].keys() == {"token", "logprob", "bytes"}


@pytest.mark.parametrize("stream", [True, False])
def test_completions_logprobs(bytelevel, ids, stream):
    body = {"stream": stream, "logprobs": 1}
    read = answer(present(bytelevel, body, COMPLETIONS), engine([*ids, EOS], body, cuts=range(99)))
    assert [entry["token_logprobs"] for entry in read.logprobs] == [-i / 8 for i in [*ids, EOS]]
    assert [entry["text_offset"] for entry in read.logprobs] == [
        len(bytelevel.decode(ids[:n]).rstrip("\ufffd")) for n in range(len(ids) + 1)
    ]
    assert all(entry["tokens"] in entry["top_logprobs"] for entry in read.logprobs)


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_cover_the_tokens_of_the_stop_string(bytelevel, stream):
    ids = bytelevel.encode("Hello STOP world").ids
    body = {"stream": stream, "logprobs": True, "stop": " STOP"}
    presenter = present(bytelevel, body)
    read = answer(presenter, engine(ids, body, cuts=range(99)))
    assert len(read.logprobs) == presenter.completion_tokens
    assert b"".join(bytes(entry["bytes"]) for entry in read.logprobs) == b"Hello STOP"
    if stream:
        last = read.chunks[-1]["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in last) == b" STOP", "held back with their text"


def test_logprobs_wait_for_their_text_within_one_chunk(bytelevel):
    ids = bytelevel.encode("Hello STO").ids
    presenter = present(bytelevel, {"stream": True, "logprobs": True, "stop": " STOP"})
    (_, event) = presenter.feed([chunk(*ids, top=0)])
    choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
    assert choice["delta"]["content"] == "Hello"
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "Hello"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("minimum", range(8))
def test_stop_strings_do_not_count_before_min_tokens(bytelevel, stream, minimum):
    pair = bytelevel.encode("ab").ids
    body = {"stream": stream, "stop": "ab", "min_tokens": minimum}
    presenter = present(bytelevel, body)
    read = answer(presenter, engine(pair * 5, body))
    pairs = minimum // len(pair)  # whole ones that pass; the next one ends after the minimum
    assert read.text == "ab" * pairs
    assert (presenter.completion_tokens, read.stop_reason) == ((pairs + 1) * len(pair), "ab")


def test_infinite_logprobs_are_numbers(bytelevel):
    presenter = present(bytelevel, {"logprobs": True, "top_logprobs": 2})
    odd = TokenLogprob(40, float("-inf"), ((41, float("nan")), (42, -0.5)))
    presenter.feed([TokenChunk((40,), (odd,)), Finished(FinishReason.LENGTH, 1)])
    entry = json.loads(presenter.document())["choices"][0]["logprobs"]["content"][0]
    assert [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])] == [-9999.0, -9999.0, -9999.0]


@pytest.mark.parametrize("stream", [True, False])
def test_a_part_of_a_character_has_no_name_and_the_last_part_that_of_the_whole(bytelevel, stream):
    parts = [bytelevel.token_to_id(c) for c in "ðŁĴ¡"]  # 💡
    a = bytelevel.token_to_id("a")
    body = {"stream": stream, "logprobs": True}
    read = answer(present(bytelevel, body), engine([a, *parts, *parts[:2], a], body, cuts=range(99)))
    assert [entry["token"] for entry in read.logprobs] == ["a", "", "", "", "💡", "", "", "a"]
    assert read.text == "a💡\ufffda"


def test_logprobs_that_were_not_asked_for_are_not_shown(bytelevel, ids):
    presenter = present(bytelevel, {"logprobs": False})
    presenter.feed([chunk(*ids, top=1), Finished(FinishReason.LENGTH, len(ids))])
    assert json.loads(presenter.document())["choices"][0]["logprobs"] is None


@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_token_ids_are_given_if_asked_for(bytelevel, ids, endpoint, stream):
    body = {"stream": stream, "return_token_ids": True}
    read = answer(present(bytelevel, body, endpoint), engine([*ids, EOS], body, cuts=range(99)))
    assert read.token_ids == [*ids, EOS]
    first = read.chunks[0] if endpoint == CHAT else read.chunks[0]["choices"][0]
    assert first["prompt_token_ids"] == list(PROMPT)


def test_tokens_may_be_named_by_id(bytelevel, ids):
    body = {"logprobs": True, "return_tokens_as_token_ids": True}
    read = answer(present(bytelevel, body), engine(ids, body))
    assert [entry["token"] for entry in read.logprobs] == [f"token_id:{i}" for i in ids]


def test_contradictions_of_an_engine_are_failures(bytelevel, ids):
    with pytest.raises(EngineFailed, match="log probabilities"):
        present(bytelevel, {"logprobs": True}).feed([chunk(*ids)])
    with pytest.raises(EngineFailed, match="counted"):
        present(bytelevel, {}).feed([chunk(*ids), Finished(FinishReason.LENGTH, len(ids) + 1)])


def test_an_answer_that_did_not_end_has_no_finish_reason(bytelevel, ids):
    presenter = present(bytelevel, {"stream": True})
    presenter.feed([chunk(*ids)])
    assert not presenter.finished
    with pytest.raises(RuntimeError):
        presenter.finish()
    with pytest.raises(RuntimeError):
        presenter.document()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 20_000}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 2.5}, "top_logprobs"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": 3}, "stop_token_ids"),
        ({"min_tokens": "1"}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ],
)
def test_what_cannot_be_presented_is_refused_by_name(bytelevel, body, param):
    with pytest.raises(InvalidRequest) as refused:
        present(bytelevel, body)
    assert refused.value.param == param


def test_null_is_absent(bytelevel, ids):
    body = dict.fromkeys(
        ["stop", "stream", "stream_options", "logprobs", "top_logprobs", "stop_token_ids", "min_tokens"]
    )
    assert answer(present(bytelevel, body), engine(ids, body)).text == "Hello world, 你好 😀"


@pytest.mark.parametrize("stream", [True, False])
def test_who_says_it(bytelevel, stream):
    for members, role in (({}, "assistant"), ({"add_generation_prompt": False}, "user")):
        body = {"stream": stream, "messages": [{"role": "user", "content": "x"}], **members}
        read = answer(present(bytelevel, body), engine([40, EOS], body))
        choice = read.chunks[0]["choices"][0]
        assert choice["delta" if stream else "message"]["role"] == role
