"""Whatever the tokens and however they are cut: the same answer, and the one that a whole decode gives."""

import pytest
from answers import CHAT, COMPLETIONS, EOS, answer, engine, present
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

WORDS = ["Hello", " STOP", "ST", "OP", "你好", "😀", "👩‍👩‍👧‍👦", "e\u0301", "\n\n", " world", "🦊", "\ufffd", "aa", "a"]
NAMED = [word for word in WORDS if word not in ("👩‍👩‍👧‍👦", "\ufffd")]
"""Without a token that ends one character and begins the next: as in vLLM it has no name."""


@st.composite
def cases(draw, tokenizer):
    """A request, the tokens that its engine samples, and a cutting of them."""
    if draw(st.booleans()):
        ids = tokenizer.encode("".join(draw(st.lists(st.sampled_from(WORDS), max_size=8)))).ids
    else:
        ids = draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=25))
    if draw(st.booleans()):
        ids.insert(draw(st.integers(0, len(ids))), EOS)
    text = tokenizer.decode(ids) or "x"
    start = draw(st.integers(0, len(text) - 1))
    substring = text[start : start + draw(st.integers(1, 6))]
    body = {
        "stop": draw(st.lists(st.sampled_from(["STOP", "OP", "a", "aab", "\n\n", "é", substring]), max_size=3)),
        "stop_token_ids": draw(st.lists(st.sampled_from(ids or [3]), max_size=1)),
        "include_stop_str_in_output": draw(st.booleans()),
        "ignore_eos": draw(st.booleans()),
        "min_tokens": draw(st.integers(0, 4)),
        "skip_special_tokens": draw(st.booleans()),
        "return_token_ids": draw(st.booleans()),
    }
    endpoint = draw(st.sampled_from([CHAT, COMPLETIONS]))
    if draw(st.booleans()):
        body |= {"logprobs": True, "top_logprobs": 1} if endpoint == CHAT else {"logprobs": 1}
    cuts = draw(st.lists(st.integers(1, 25)) | st.just(list(range(26))))
    return ids, body, endpoint, cuts, draw(st.integers(1, 3))


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_cutting_gives_the_same_answer(bytelevel, data):
    ids, body, endpoint, cuts, batch = data.draw(cases(bytelevel))
    whole = present(bytelevel, body, endpoint)
    reference = answer(whole, engine(ids, body))
    for stream in (True, False):
        request = body | {"stream": stream}
        presenter = present(bytelevel, request, endpoint)
        read = answer(presenter, engine(ids, body, cuts=cuts), batch)
        assert (read.text, read.finish, read.stop_reason) == (
            reference.text, reference.finish, reference.stop_reason,
        )  # fmt: skip
        assert read.logprobs == reference.logprobs
        assert read.token_ids == reference.token_ids
        assert presenter.usage() == whole.usage()
        if "logprobs" in body:
            assert len(read.logprobs) == presenter.completion_tokens


@settings(deadline=None, max_examples=120)
@given(words=st.lists(st.sampled_from(WORDS), max_size=8), data=st.data())
def test_the_answer_is_that_of_a_whole_decode(bytelevel, words, data):
    text = "".join(words)
    ids = bytelevel.encode(text).ids
    stops = data.draw(st.lists(st.sampled_from(["STOP", "OP", "aab", "\n\n", "😀", "\u200d", "d"]), max_size=3))
    include = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(1, 25)))
    body = {"stop": stops, "include_stop_str_in_output": include, "stream": data.draw(st.booleans())}
    presenter = present(bytelevel, body)
    read = answer(presenter, engine(ids, body, cuts=cuts))
    found = [(text.find(stop) + len(stop), place, stop) for place, stop in enumerate(stops) if stop in text]
    if not found:
        assert (read.text, read.finish, read.stop_reason) == (text.rstrip("\ufffd"), ["length"], None)
        return
    end, _, stop = min(found)
    assert read.text == text[: end if include else end - len(stop)]
    assert (read.finish, read.stop_reason) == (["stop"], stop)
    read_ids = ids[: presenter.completion_tokens]
    assert len(streamed(bytelevel, read_ids[:-1])) < end <= len(bytelevel.decode(read_ids))


def streamed(tokenizer, ids):
    """What the library's stream, and so vLLM's, has said: nothing while the last token ends inside a character."""
    stream = DecodeStream(skip_special_tokens=True)
    return "".join(stream.step(tokenizer, token) or "" for token in ids)


def test_the_sentencepiece_family_is_presented_alike(llama):
    ids = llama.encode("Hello world, 你好 😀 a").ids
    for stream in (True, False):
        for cuts in ([], range(99)):
            body = {"stream": stream, "stop": ["😀 "]}
            read = answer(present(llama, body, eos_token_ids={2}), engine(ids, body, cuts=cuts, eos=2))
            assert read.text.strip() == "Hello world, 你好"


@pytest.mark.parametrize("family", ["llama", "gemma", "metaspace"])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cutting_gives_the_same_answer_in_every_family(request, family, data):
    tokenizer = request.getfixturevalue(family)
    ids, body, endpoint, cuts, batch = data.draw(cases(tokenizer))
    eos = tokenizer.token_to_id("</s>")
    reads = [
        answer(present(tokenizer, asked, endpoint, eos_token_ids={eos}), engine(ids, asked, cuts=where, eos=eos), size)
        for asked in (body, {**body, "stream": True})
        for where, size in (((), 1), (cuts, batch))
    ]
    told = [(r.text, r.finish, r.stop_reason, r.logprobs, r.token_ids) for r in reads]
    assert all(one == told[0] for one in told)


@settings(deadline=None, max_examples=120)
@given(words=st.lists(st.sampled_from(NAMED), max_size=8), cuts=st.lists(st.integers(1, 25)), stream=st.booleans())
def test_the_names_of_tokens_are_the_text(bytelevel, words, cuts, stream):
    """However a character is spread over tokens, and however those come: nothing is named twice or not at all."""
    ids = bytelevel.encode("".join(words)).ids
    for endpoint, body in ((CHAT, {"logprobs": True}), (COMPLETIONS, {"logprobs": 1})):
        asked = {**body, "stream": stream}
        read = answer(present(bytelevel, asked, endpoint), engine(ids, asked, cuts=cuts))
        names = [entry.get("token", entry.get("tokens")) for entry in read.logprobs]
        assert "".join(names) == read.text
        if endpoint == COMPLETIONS:
            offsets = [entry["text_offset"] for entry in read.logprobs]
            assert offsets == [len("".join(names[:n])) for n in range(len(names))]
        else:
            assert b"".join(bytes(entry["bytes"]) for entry in read.logprobs).decode() == read.text
