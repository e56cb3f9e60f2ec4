"""The engine on a CUDA device: same tokens as on the CPU."""

from __future__ import annotations

import asyncio

import pytest
import torch
from support import Plain, prompt_of, running

from pdhub.api import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

COUNT = 16


@pytest.mark.parametrize(
    "options", [{}, {"graphs": "off"}, {"batching": "exact"}, {"speculation": "prompt_lookup"}], ids=str
)
async def test_greedy_tokens_equal_generate(family_dir, options):
    plain = Plain(family_dir)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((7, 15, 16, 17, 33, 50))]
    expected = [plain.greedy(prompt, COUNT) for prompt in prompts]
    async with running(family_dir, device="cuda", slots=3, chunk_tokens=32, **options) as driver:
        one = [(await driver.answer(prompt, COUNT, min_tokens=COUNT)).tokens for prompt in prompts]
        assert one == expected
        for part in (slice(0, 3), slice(3, 6)):
            done = await asyncio.gather(*(driver.answer(prompt, COUNT, min_tokens=COUNT) for prompt in prompts[part]))
            assert [answer.tokens for answer in done] == expected[part]


async def test_sampling_and_logprobs_work_there(llama_dir):
    async with running(llama_dir, device="cuda", dtype="bfloat16") as driver:
        sampling = Sampling(0.8, top_p=0.9, seed=4, frequency_penalty=0.5, repetition_penalty=1.1)
        first, again = [
            await driver.answer(prompt_of(20), COUNT, sampling=sampling, logprobs=2, ignore_eos=True) for _ in range(2)
        ]
    assert first.tokens == again.tokens
    assert len(first.logprobs) == COUNT
