"""Prefill → landing → decode gives the tokens of plain generation, for every family."""

from __future__ import annotations

import asyncio

import pytest
from support import Plain, prompt_of, running

COUNT = 12


@pytest.mark.parametrize("options", [{"slots": 4}, {"slots": 4, "batching": "fast", "block_tokens": 8}], ids=str)
async def test_greedy_tokens_equal_generate(family_dir, options):
    plain = Plain(family_dir)
    lengths = (1, 7, 8, 9, 15, 16, 17, 40)
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    expected = [plain.greedy(prompt, COUNT) for prompt in prompts]
    async with running(family_dir, **options) as driver:
        one = [(await driver.answer(prompt, COUNT, min_tokens=COUNT)).tokens for prompt in prompts]
        assert one == expected
        for half in (slice(0, 4), slice(4, 8)):
            together = await asyncio.gather(
                *(driver.answer(prompt, COUNT, min_tokens=COUNT) for prompt in prompts[half])
            )
            assert [answer.tokens for answer in together] == expected[half]


async def test_chunks_change_nothing(llama_dir):
    plain = Plain(llama_dir)
    prompts = [prompt_of(length) for length in (15, 16, 17, 31, 32, 33, 70)]
    expected = [plain.greedy(prompt, COUNT) for prompt in prompts]
    async with running(llama_dir, chunk_tokens=16) as driver:
        assert [(await driver.answer(p, COUNT, min_tokens=COUNT)).tokens for p in prompts] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_other_types_stay_close(llama_dir, dtype):
    """Rounding is coarser, so only the first tokens are compared with float32."""
    plain = Plain(llama_dir)
    async with running(llama_dir, dtype=dtype, slots=2) as driver:
        prompts = [prompt_of(20, seed) for seed in range(6)]
        hits = 0
        for prompt in prompts:
            hits += (await driver.answer(prompt, 4, min_tokens=4)).tokens[0] == plain.greedy(prompt, 1)[0]
        assert hits >= 4
