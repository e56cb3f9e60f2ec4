"""Digests of a prompt's beginnings."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.router.openai import CHAT_PATH, COMPLETIONS_PATH, parse_request
from pdhub.router.prefix import BLOCK_BYTES, MAX_BLOCKS, prefix_of


def completion(prompt, **members):
    return prefix_of({"prompt": prompt, **members}, chat=False)


def chat(*messages, **members):
    return prefix_of({"messages": [{"role": r, "content": c} for r, c in messages], **members}, chat=True)


def common(one, two):
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def test_alike_until_they_differ():
    shared = "system prompt " * 200
    one, two = completion(shared + "a" * 1000), completion(shared + "b" * 1000)
    assert common(one, two) == len(shared) // BLOCK_BYTES
    assert len(one) == len(shared + "a" * 1000) // BLOCK_BYTES


def test_a_conversation_that_goes_on_keeps_its_beginning():
    turns = [("system", "be kind " * 100), ("user", "hello " * 100), ("assistant", "hi " * 100)]
    assert common(chat(*turns[:2]), chat(*turns)) == len(chat(*turns[:2]))


def test_parts_read_as_text():
    text = "x" * 2000
    assert chat(("user", [{"type": "text", "text": text}])) == chat(("user", text))
    assert chat(("user", [{"type": "image_url", "image_url": {}}, text])) == chat(("user", text))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (chat(("user", "x" * 2000)), chat(("system", "x" * 2000))),
        (chat(("user", "x" * 2000)), chat(("user", "x" * 2000), tools=[{"type": "function"}])),
        (completion("x" * 2000), completion("x" * 2000, cache_salt="mine")),
        (completion(list(range(500))), completion(list(range(1, 501)))),
    ],
)
def test_what_makes_them_differ(one, two):
    assert one
    assert common(one, two) == 0


def test_several_prompts_go_by_the_first():
    assert completion(["y" * 2000, "z"]) == completion("y" * 2000)
    assert completion([[1] * 500, [2]]) == completion([1] * 500)


def test_bounded_and_short_ones_have_none():
    assert len(completion("long" * BLOCK_BYTES * MAX_BLOCKS)) == MAX_BLOCKS
    assert len(completion([7] * 10**6)) == MAX_BLOCKS
    assert completion("short") == ()
    assert chat(("user", None)) == ()
    assert all(0 <= digest < 1 << 53 for digest in completion("long" * 9999))


def test_requests_carry_it():
    body = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * 5000 + b'"}]}'
    assert len(parse_request(CHAT_PATH, body, "m", ()).prefix) == 5006 // BLOCK_BYTES
    assert parse_request(COMPLETIONS_PATH, b'{"model":"m","prompt":"short"}', "m", ()).prefix == ()


def test_ids_alike_until_they_differ():
    shared = list(range(1000, 2000))  # of five bytes each
    one, two = completion([*shared, 1, *shared]), completion([*shared, 12, *shared])
    assert common(one, two) == 5 * len(shared) // BLOCK_BYTES
    assert completion([*shared, *shared])[: len(completion(shared))] == completion(shared)
    assert common(completion([1, 12] * 200), completion([11, 2] * 200)) == 0


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=3000), st.text(max_size=1500), st.text(max_size=1500))
def test_any_text(shared, one, two):
    a, b = completion(shared + one), completion(shared + two)
    assert common(a, b) >= len(shared.encode(errors="surrogatepass")) // BLOCK_BYTES
    assert a == completion(shared + one)
