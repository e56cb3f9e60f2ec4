"""Text streams: exact against one whole decode, whatever the tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from pdhub.api import ConfigError
from pdhub.router.presentation.text import TextDecoder, load_text_decoder

FAMILIES = ["bytelevel", "llama", "gemma", "metaspace"]
TEXTS = [
    "Hello world, STOP here",
    " leading and trailing ",
    "你好世界 😀👩‍👩‍👧‍👦 e\u0301 naïve\n\n\tx",
    "\ufffd is a character of its own \ufffd\ufffd.",
    "",
]


@pytest.fixture(params=FAMILIES)
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def raw(bytelevel):
    return TextDecoder(bytelevel)


def pieces(decoder, ids, **options):
    stream = decoder.stream(**options)
    return [stream.push(i) for i in ids]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_one_whole_decode(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert "".join(pieces(TextDecoder(tokenizer), ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("family", ["bytelevel", "llama", "gemma"])
def test_no_piece_has_half_a_character(family, request):
    tokenizer = request.getfixturevalue(family)
    ids = tokenizer.encode("你好 😀👩‍👩‍👧‍👦 é").ids
    assert not [piece for piece in pieces(TextDecoder(tokenizer), ids) if "\ufffd" in piece]


@pytest.mark.parametrize("end", ["a😀", "a\ufffd", "a"])
def test_the_last_half_character_is_no_text(raw, bytelevel, end):
    ids = bytelevel.encode(end).ids[: None if end[1:] != "😀" else -1]
    assert "".join(pieces(raw, ids)) == "a"


LIKE_VLLM = ["Hello", " STOP", "你好", "😀", "👩‍👩‍👧‍👦", "e\u0301", " world", "🦊", "\ufffd", "aa", " "]


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_pieces_are_those_of_vllm(request, family, data):
    """vLLM's detokeniser is this stream of the library, primed with the prompt."""
    tokenizer = request.getfixturevalue(family)
    text = st.lists(st.sampled_from(LIKE_VLLM), max_size=6).map("".join)
    ids = tokenizer.encode(data.draw(text)).ids[: data.draw(st.integers(1, 40))]
    if family in ("bytelevel", "metaspace"):  # a run of byte tokens with a bad one is another matter
        ids = data.draw(st.just(ids) | st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=12))
    prompt, skip = tokenizer.encode(data.draw(text).replace("\ufffd", "")).ids, data.draw(st.booleans())
    library = DecodeStream(ids=prompt, skip_special_tokens=skip)
    expected = [library.step(tokenizer, i) or "" for i in ids]
    assert pieces(TextDecoder(tokenizer), ids, skip_special_tokens=skip, after=prompt) == expected


def test_text_of_the_prompt_does_not_come_again(raw, bytelevel):
    (both,) = [i for i in range(bytelevel.get_vocab_size()) if raw.token_bytes(i) == "naï".encode()[:-1]]
    rest = bytelevel.token_to_id("¯")  # the last byte of ï
    assert raw.decode([rest], after=[both]) == "ï"


def test_special_tokens_are_hidden_unless_wanted(tokenizer):
    special = next(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    ids = [*tokenizer.encode("Hello").ids, special, *tokenizer.encode(" a").ids]
    decoder = TextDecoder(tokenizer)
    assert decoder.decode(ids) == tokenizer.decode(ids)
    assert decoder.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)


def test_text_continues_the_prompt(llama):
    decoder = TextDecoder(llama)
    hello, world = llama.token_to_id("▁Hello"), llama.token_to_id("▁world")
    assert decoder.decode([hello, world]) == "Hello world"
    assert decoder.decode([world], after=[1, hello]) == " world"
    assert decoder.decode([hello], after=[1]) == "Hello"


def test_a_character_may_begin_in_the_prompt(raw, bytelevel):
    ids = bytelevel.encode("🦊").ids
    assert len(ids) > 1
    assert raw.decode(ids[1:], after=ids[:1]) == "🦊"


def test_an_unknown_id_is_no_text(tokenizer):
    assert TextDecoder(tokenizer).decode([10_000_000]) == ""


@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_any_bytes_decode_as_the_library_decodes_them(raw, bytelevel, data):
    ids = data.draw(st.lists(st.integers(0, bytelevel.get_vocab_size() - 1), max_size=40))
    skip = data.draw(st.booleans())
    whole = bytelevel.decode(ids, skip_special_tokens=skip)
    text = raw.decode(ids, skip_special_tokens=skip)
    assert whole.startswith(text)
    assert whole == text or whole.endswith("\ufffd"), "only what ends with no character is not shown"


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=20))
def test_any_text_survives_byte_fallback(llama, gemma, text):
    for tokenizer in (llama, gemma):
        ids = tokenizer.encode(text).ids
        assert TextDecoder(tokenizer).decode(ids) == tokenizer.decode(ids)


def test_bad_bytes_among_byte_tokens_cost_one_mark_each(llama):
    ids = [llama.token_to_id(f"<0x{byte:02X}>") for byte in (0xF0, 0x41, 0xE4, 0xFF, 0xC3, 0x41)]
    assert pieces(TextDecoder(llama), ids) == ["", "\ufffdA", "", "", "", "\ufffd\ufffd\ufffdA"]


def test_bytes_of_a_token(raw, bytelevel, llama, metaspace):
    assert b"".join(raw.token_bytes(i) for i in bytelevel.encode("é 你").ids) == "é 你".encode()
    assert raw.token_bytes(bytelevel.token_to_id("<|end|>")) == b"<|end|>"
    assert raw.token_bytes(bytelevel.token_to_id("<tool call é>")) == "<tool call é>".encode()
    assert TextDecoder(llama).token_bytes(llama.token_to_id("▁Hello")) == b" Hello"
    assert TextDecoder(llama).token_bytes(llama.token_to_id("<0xE4>")) == b"\xe4"
    assert TextDecoder(metaspace).token_bytes(metaspace.token_to_id("▁Hello")) == b"Hello"


def test_loading(tmp_path, bytelevel):
    bytelevel.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        decoder = load_text_decoder(str(path))
        assert decoder.decode(bytelevel.encode("Hello 你").ids) == "Hello 你"


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_missing_or_broken_tokenizer_says_where(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"model\.tokenizer.*tokenizer\.json"):
        load_text_decoder(str(tmp_path))
