"""Prompt lookup: what it proposes, and that the text stays what it is."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdhub_transformers.speculation import PromptLookup
from support import Plain, prompt_of, running

from pdhub.api import Sampling, TokenChunk

COUNT = 40


def naive(tokens, sizes, limit):
    for size in sizes:
        tail = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if len(tail) == size and tokens[start : start + size] == tail:
                return tokens[start + size : start + size + limit]
    return []


@settings(deadline=None, max_examples=200)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), limit=st.integers(1, 6), cut=st.integers(0, 40))
def test_it_proposes_what_followed_the_longest_ngram_last(tokens, limit, cut):
    lookup = PromptLookup(tokens[:cut], ngram_max=3, ngram_min=1, limit=limit)
    lookup.extend(tokens[cut:])
    assert lookup.propose(limit) == naive(tokens, (3, 2, 1), limit)
    assert lookup.propose(0) == []


def test_misses_narrow_and_hits_widen():
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], ngram_max=2, ngram_min=2, limit=4)
    assert len(lookup.propose(8)) == 4
    lookup.verified(4, 0)
    assert lookup.propose(8) == [3]
    lookup.verified(1, 1)
    assert lookup.propose(8) == [3, 4]


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.0, repetition_penalty=1.1, frequency_penalty=0.1)])
async def test_the_text_is_the_same(llama_dir, sampling):
    prompts = [prompt_of(12, seed) * 2 for seed in range(8)] + [(5, 9) * 20, (1, 2, 3) * 9, (7,) * 30]
    off: list[list[int]] = []
    async with running(llama_dir) as driver:
        for prompt in prompts:
            off.append((await driver.answer(prompt, COUNT, sampling=sampling, ignore_eos=True)).tokens)
    options = {"speculation": "prompt_lookup", "speculation_ngram_min": 1, "slots": 4}
    async with running(llama_dir, **options) as driver:
        requests = [driver.answer(prompt, COUNT, sampling=sampling, ignore_eos=True) for prompt in prompts]
        on = [answer.tokens for part in range(0, 12, 4) for answer in await asyncio.gather(*requests[part : part + 4])]
    assert on == off


async def test_several_tokens_come_at_once(llama_dir):
    """And logprobs, the limit and the count are right all the same."""
    plain = Plain(llama_dir)
    prompt = prompt_of(8)
    text = prompt + tuple(plain.greedy(prompt, COUNT))  # the model will now repeat what it said before
    prompt = text + prompt
    async with running(llama_dir, speculation="prompt_lookup", speculation_ngram_min=1) as driver:
        received = await driver.receive(prompt, logprobs=1)
        await driver.inject(received)
        items = [item async for item in driver.stream(received, driver.request(received, COUNT, logprobs=1))]
        driver.engine.release(received.landing)
    chunks = [item for item in items if isinstance(item, TokenChunk)]
    assert any(len(chunk.token_ids) > 1 for chunk in chunks)
    assert all(len(chunk.token_ids) == len(chunk.logprobs) for chunk in chunks)
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert len(tokens) == items[-1].completion_tokens <= COUNT
    for entry, token in zip([e for chunk in chunks for e in chunk.logprobs], tokens, strict=True):
        assert entry.token_id == token


async def test_sampled_requests_do_not_speculate(llama_dir):
    async with running(llama_dir, speculation="prompt_lookup", speculation_ngram_min=1) as driver:
        received = await driver.receive((3, 4) * 12)
        await driver.inject(received)
        request = driver.request(received, 12, sampling=Sampling(1.0, seed=3), ignore_eos=True)
        items = [item async for item in driver.stream(received, request)]
        driver.engine.release(received.landing)
    assert all(len(item.token_ids) == 1 for item in items[:-1])
