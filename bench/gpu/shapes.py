"""Model directories: real shapes with a configuration and no weights, and a small real model from a GGUF."""

from __future__ import annotations

import json
import shutil
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

SHAPES = {"llama-1.24b": LLAMA_1B, "qwen3-8.19b": QWEN3_8B}
KV_TOKEN_BYTES = {"llama-1.24b": 16 * 2 * 8 * 64 * 2, "qwen3-8.19b": 36 * 2 * 8 * 128 * 2}


def shape(name: str, out: Path, tokenizer: Path) -> Path:
    """Write a directory that vLLM's ``--load-format dummy`` and the transformers engine's ``weights: random`` take.

    Args:
        tokenizer: a directory with any tokenizer; prompts are token ids.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(SHAPES[name]))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, out / file)
    return out


def real(gguf: Path, out: Path) -> Path:
    """The model of a GGUF in float32, converted once."""
    from pdhub_transformers.convert import convert_gguf

    return convert_gguf(gguf, out, dtype="float32")
