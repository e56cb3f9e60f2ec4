"""The engine on a real model: SmolLM2-135M-Instruct."""

from __future__ import annotations

import asyncio

import pytest
from support import Plain, running
from transformers import AutoTokenizer

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

COUNT = 24  # the end-to-end tests compare 64
TOPICS = (
    "The capital of France is", "Write a haiku about rain.", "def fibonacci(n):", "1, 2, 3, 4,",
    "Once upon a time there was a", "The three primary colours are", "Water boils at", "List five animals:",
    "A recipe for pancakes:", "The first president of the United States", "In the year 2050", "Dear Sir or Madam,",
    "Q: What is 17 + 25?\nA:", "import numpy as np\n", "red blue red blue red", "The opposite of hot is",
    "Roses are red,", "To be or not to be", "The quick brown fox", "Photosynthesis is",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    return AutoTokenizer.from_pretrained(smollm2_dir, local_files_only=True)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """20 prompts; some end one token before, at and after a block's border, some need several chunks."""
    ids = [tokenizer(topic)["input_ids"] for topic in TOPICS]
    lengths = dict(enumerate((15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 160)))
    return [tuple((one * 40)[: lengths[index]]) if index in lengths else tuple(one) for index, one in enumerate(ids)]


@pytest.fixture(scope="module")
def expected(smollm2_dir, prompts):
    plain = Plain(smollm2_dir)
    return [plain.greedy(prompt, COUNT) for prompt in prompts]


def test_it_knows_the_capital_of_france(tokenizer, smollm2_dir):
    text = tokenizer.decode(Plain(smollm2_dir).greedy(tokenizer("The capital of France is")["input_ids"], 1))
    assert text == " Paris"


@pytest.mark.parametrize("text", ["a  12345", "  two\n\n\ttabs 7", "😀 émoji 中文 don't", "x = [1, 22, 333]"])
def test_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


async def answers(driver, prompts):
    """Tokens of prompts that run at once."""
    done = await asyncio.gather(*(driver.answer(prompt, COUNT, min_tokens=COUNT) for prompt in prompts))
    return [answer.tokens for answer in done]


async def test_greedy_tokens_equal_generate(smollm2_dir, prompts, expected):
    """Eight at once, and some alone; chunks of 64 tokens."""
    async with running(smollm2_dir, slots=8, chunk_tokens=64) as driver:
        for start in range(0, len(prompts), 8):
            assert await answers(driver, prompts[start : start + 8]) == expected[start : start + 8]
        for index in (2, 10, 19):
            assert await answers(driver, [prompts[index]]) == [expected[index]]


async def test_speculation_changes_nothing(smollm2_dir, prompts, expected):
    async with running(smollm2_dir, slots=2, speculation="prompt_lookup") as driver:
        for start in range(0, len(prompts), 4):
            assert await answers(driver, prompts[start : start + 2]) == expected[start : start + 2]
