"""Latent attention: the order of bytes on the wire, and that the model still computes what it did."""

from __future__ import annotations

import pytest
import torch
from conftest import make_model
from pdhub_transformers.latent import LatentGeometry, LatentRow
from support import Plain, prompt_of, running

SHAPE = {
    "hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip

GEOMETRY = LatentGeometry(
    layers=2, rank=6, rotary=4, dtype=torch.float32, device=torch.device("cpu"), block_tokens=4, drafts=1
)


@pytest.fixture(scope="module")
def deepseek_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("deepseek"), "DeepseekV3", **SHAPE)


def filled(tokens: int) -> LatentRow:
    row = LatentRow(GEOMETRY, tokens)
    row.kv.copy_(torch.arange(1, row.kv.numel() + 1, dtype=torch.float32).view(row.kv.shape))
    return row


def test_a_token_on_the_wire_is_its_latent_and_then_pairs():
    layout, row = GEOMETRY.layout("m"), filled(6)
    landing = bytearray(b"\xff" * layout.landing_bytes(6))
    row.store(memoryview(landing), 0, 6)
    for token in range(6):
        for layer in range(2):
            at = layout.block_offset(0, layer, token // 4, 6) + token % 4 * 40
            values = torch.frombuffer(landing[at : at + 40], dtype=torch.float32).tolist()
            mine = row.kv[layer, token].tolist()
            assert values == [*mine[:6], mine[6], mine[8], mine[7], mine[9]]
    tail = torch.frombuffer(landing, dtype=torch.float32)[-2 * 10 :]
    assert not tail.any()


@pytest.mark.parametrize("tokens", [1, 4, 7])
@pytest.mark.parametrize("drafts", [0, 1])
def test_a_landing_is_loaded_also_if_prefill_wrote_draft_layers(tokens, drafts):
    source, target = filled(tokens), LatentRow(GEOMETRY, 12)
    layout = GEOMETRY.accepts("m")[drafts]
    blocks = layout.groups[0].blocks(tokens)
    plain = bytearray(GEOMETRY.layout("m").landing_bytes(tokens))
    source.store(memoryview(plain), 0, tokens)
    wire = torch.full((blocks, 2 + drafts, 4, 10), torch.nan)
    wire[:, :2] = torch.frombuffer(plain, dtype=torch.float32).view(blocks, 2, 4, 10)
    landing = wire.flatten().view(torch.uint8)
    assert landing.numel() == layout.landing_bytes(tokens)
    target.load([landing], tokens, layout)
    assert torch.equal(target.kv[:, :tokens], source.kv[:, :tokens])


@pytest.mark.parametrize(("length", "chunk"), [(1, 16), (15, 16), (16, 16), (17, 16), (40, 16), (40, 64)])
async def test_greedy_tokens_equal_plain_generation(deepseek_dir, length, chunk):
    prompt, want = prompt_of(length), Plain(deepseek_dir)
    async with running(deepseek_dir, chunk_tokens=chunk, max_context=128) as driver:
        answer = await driver.answer(prompt, 20, min_tokens=20)
        assert answer.tokens == want.greedy(prompt, 20)


async def test_the_layout_is_one_group_of_latents(deepseek_dir):
    async with running(deepseek_dir, max_context=64) as driver:
        layout = driver.info.accepts[0]
        assert layout.groups[0].axes == ("token:16", "dim:40")
        assert layout.shards == 1
