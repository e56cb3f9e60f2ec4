"""Model directories: real shapes with a configuration and no weights, and a small real model from a GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}

DEEPSEEK_V32_NARROW: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    # KV as DeepSeek-V3.2 has it: 61 layers with MLA and indexer. TileRT's profile dsv32 counts and measures them.
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    # All else is as narrow as its kernels take it: 5.9 billion weights in place of 671.
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "q_lora_rank": 512,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "ep_size": 1,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "vocab_size": 129280,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.2",
}

SHAPES = {"llama-1.24b": LLAMA_1B, "qwen3-8.19b": QWEN3_8B}
KV_TOKEN_BYTES = {"llama-1.24b": 16 * 2 * 8 * 64 * 2, "qwen3-8.19b": 36 * 2 * 8 * 128 * 2}


def shape(name: str, out: Path) -> Path:
    """Write a directory that vLLM's ``--load-format dummy`` and the transformers engine's ``weights: random`` take."""
    return _directory(out, SHAPES[name])


def real(gguf: Path, out: Path) -> Path:
    """The model of a GGUF in float32, converted once."""
    from pdhub_transformers.convert import convert_gguf

    return convert_gguf(gguf, out, dtype="float32")


SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "<unk>",
)
"""First ids of :func:`words`: what the chat format of DeepSeek-V3.2 is made of."""


def narrow(out: Path) -> Path:
    """Write the narrow DeepSeek-V3.2."""
    return _directory(out, DEEPSEEK_V32_NARROW)


def _directory(out: Path, config: dict[str, Any]) -> Path:
    """With a tokenizer that has text for every id: of tokens without text nothing is streamed, and random weights would
    choose them as often as others."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config))
    (out / "tokenizer.json").write_text(json.dumps(words(config["vocab_size"])))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 163840}
    names |= {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "unk_token": SPECIAL[-1]}
    (out / "tokenizer_config.json").write_text(json.dumps(names))
    return out


def words(size: int) -> dict[str, Any]:
    """A ``tokenizer.json``: id 12 is the word ``t12``, and words have a space between them."""
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ids = {name: i for i, name in enumerate(SPECIAL)} | {f"▁t{i}": i for i in range(len(SPECIAL), size)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **plain} for i, name in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": SPECIAL[-1]},
    }
