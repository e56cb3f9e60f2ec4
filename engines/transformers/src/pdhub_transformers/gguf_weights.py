"""Configuration and weights inside a GGUF file, under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pdhub.api import ConfigError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None if it has none."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    return None


def _short(value: float) -> float:
    """Metadata are float32; the shortest decimal of the same number reads as the author wrote it."""
    return float(f"{value:.7g}")


def hf_config(meta: Mapping[str, Any], tied: bool, dtype: str) -> dict[str, Any]:
    """What ``config.json`` holds. Raises ConfigError for an architecture or rotary scaling not known here."""
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"GGUF architecture {arch!r} is not known", hint=f"known: {', '.join(ARCHITECTURES)}; else use a directory"
        )
    if meta.get(f"{arch}.rope.scaling.type", "none") != "none":
        raise ConfigError("GGUF with rotary scaling is not supported", hint="use the original model directory")
    heads = meta[f"{arch}.attention.head_count"]
    hidden = meta[f"{arch}.embedding_length"]
    head_dim = meta.get(f"{arch}.attention.key_length") or meta.get(f"{arch}.rope.dimension_count") or hidden // heads
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": meta[f"{arch}.feed_forward_length"],
        "num_hidden_layers": meta[f"{arch}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": meta[f"{arch}.context_length"],
        "rms_norm_eps": _short(meta[f"{arch}.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _short(meta.get(f"{arch}.rope.freq_base", 10000.0)),
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    for name, key in {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}.items():
        if (token_id := meta.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = token_id
    return config


def _unrotate(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp interleaves the two halves of each rotary pair; Hugging Face keeps the halves apart."""
    return (
        weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def weights(
    tensors: list[Any], config: Mapping[str, Any], dequantize: Callable[..., np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and float32 values of each tensor, one at a time. Raises ConfigError for one that has no place."""
    for tensor in tensors:
        name = hf_name(tensor.name)
        if name is None:
            raise ConfigError(f"GGUF tensor {tensor.name!r} has no place in a {config['model_type']} model")
        value = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(int(n) for n in reversed(tensor.shape)))
        if config["model_type"] == "llama":
            if ".q_proj." in name:
                value = _unrotate(value, config["num_attention_heads"])
            elif ".k_proj." in name:
                value = _unrotate(value, config["num_key_value_heads"])
        yield name, np.array(value, dtype=np.float32, order="C")  # a copy: the reader's memory is a read-only file map
