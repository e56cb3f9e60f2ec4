"""SmolLM2 through router → prefill → handoff → decode equals the same model's plain generation, token for token."""

import asyncio
import json

import aiohttp
import pytest

from pdhub.testing.hub import toy_topology

pytestmark = [pytest.mark.e2e, pytest.mark.model]

TOKENS = 64
BLOCK = 16
CHUNK = 64
SEEDS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "List the planets of the solar system:",
    "Water boils at",
]
# Around the borders of blocks and chunks; beyond CHUNK the prompt is computed in several chunks.
LENGTHS = [5, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 127, 128, 129, 200]


@pytest.fixture(scope="module")
def prompts(smollm2):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{smollm2}/tokenizer.json")
    out = []
    for number, length in enumerate(LENGTHS):
        ids = tokenizer.encode(SEEDS[number % len(SEEDS)] * 80).ids
        out.append(ids[number : number + length])
    assert [len(p) for p in out] == LENGTHS
    return out


@pytest.fixture(scope="module")
def plain(smollm2, prompts):
    """``model.generate`` of transformers itself, one prompt at a time, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, local_files_only=True)
    out = []
    with torch.inference_mode():
        for ids in prompts:
            whole = model.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
            )  # fmt: skip
            out.append(whole[0, len(ids) :].tolist())
    return out


def topology(path, transport):
    options = {"dtype": "float32", "block_tokens": BLOCK, "max_context": 512}
    data = toy_topology(
        engine="transformers",
        fast=options | {"slots": 1, "speculation": "prompt_lookup"},
        general=options | {"slots": 8},
        prefill=options | {"chunk_tokens": CHUNK},
        transport=transport,
        handoff={"verify": True},
        admission={"default_budget_s": 300},
    )
    data["model"] = {"name": "smollm2", "path": str(path)}
    for node in [*data["prefill"], *(n for p in data["pools"] for n in p["nodes"])]:
        node["threads"] = 1
    return data


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_greedy_tokens_equal_plain_generation(tree, smollm2, prompts, plain, transport):
    running = tree(topology(smollm2, transport))
    await asyncio.to_thread(running.start_all)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def tokens(ids, tpot_ms=None):
            body = {
                "model": "smollm2", "prompt": ids, "max_tokens": TOKENS, "min_tokens": TOKENS,
                "temperature": 0, "return_token_ids": True, "ignore_eos": False,
            }  # fmt: skip
            headers = {} if tpot_ms is None else {"x-slo-tpot-ms": str(tpot_ms)}
            async with session.post(f"{running.url}/v1/completions", json=body, headers=headers) as reply:
                text = await reply.text()
                assert reply.status == 200, text
                pool = "general" if tpot_ms is None else "fast"
                assert reply.headers["x-pdhub-pool"] == pool
                return json.loads(text)["choices"][0]["token_ids"]

        one_by_one = [await tokens(ids) for ids in prompts]
        assert one_by_one == plain
        eight = [await asyncio.gather(*(tokens(i) for i in prompts[n : n + 8])) for n in range(0, len(prompts), 8)]
        assert [t for group in eight for t in group] == plain
        if transport == "shm":  # speculation does not know how the KV came
            speculated = [await tokens(ids, tpot_ms=5) for ids in prompts]
            assert speculated == plain
    assert running.leaks() == {}
