"""Write a small random model in Hugging Face's format: ``tiny_models.py qwen3|deepseek DIRECTORY``. No download.

The tokenizer is byte-level: 256 bytes and three specials. The same kind always has the same bytes.

* ``qwen3``: three layers, grouped-query attention with norms of queries and keys.
* ``deepseek``: DeepSeek-V3 with latent attention, one dense and two mixture-of-experts layers, and one layer for
  multi-token prediction. The latent's width is the real model's: vLLM's CPU kernel exists for no other. Each layer adds
  little to the residual, so that the model is nearly a bigram model and its (random) draft layer is right more often
  than not.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, HEADS, VOCABULARY, CONTEXT = 128, 3, 4, 320, 4096
BOS, EOS = 1, 2
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Weights:
    """Random tensors by name."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, name: str, *shape: int, scale: float = 1.0) -> None:
        noise = torch.randn(*shape, generator=self._random)
        self.tensors[f"{name}.weight"] = noise * (scale / math.sqrt(shape[-1]))

    def ones(self, name: str, size: int = HIDDEN) -> None:
        self.tensors[f"{name}.weight"] = torch.ones(size)

    def ends(self) -> None:
        self.add("model.embed_tokens", VOCABULARY, HIDDEN, scale=math.sqrt(HIDDEN))
        self.add("lm_head", VOCABULARY, HIDDEN, scale=2.0)
        self.ones("model.norm")

    def mlp(self, name: str, width: int, scale: float) -> None:
        self.add(f"{name}.gate_proj", width, HIDDEN)
        self.add(f"{name}.up_proj", width, HIDDEN)
        self.add(f"{name}.down_proj", HIDDEN, width, scale=scale)


def qwen3() -> tuple[Weights, dict[str, Any]]:
    kv_heads, size, scale, weights = 2, 32, 0.5, Weights()
    weights.ends()
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights.ones(f"{name}.input_layernorm")
        weights.ones(f"{name}.post_attention_layernorm")
        for part, heads in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)):
            weights.add(f"{name}.self_attn.{part}_proj", heads * size, HIDDEN)
        weights.add(f"{name}.self_attn.o_proj", HIDDEN, HEADS * size, scale=scale)
        weights.ones(f"{name}.self_attn.q_norm", size)
        weights.ones(f"{name}.self_attn.k_norm", size)
        weights.mlp(f"{name}.mlp", 2 * HIDDEN, scale)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": kv_heads,
        "head_dim": size,
    }
    return weights, config


def deepseek() -> tuple[Weights, dict[str, Any]]:
    latent, rope, plain, value, query, experts, scale, weights = 512, 64, 64, 64, 64, 4, 0.2, Weights()
    weights.ends()

    def layer(number: int, dense: bool) -> None:
        name = f"model.layers.{number}"
        weights.ones(f"{name}.input_layernorm")
        weights.ones(f"{name}.post_attention_layernorm")
        attention = f"{name}.self_attn"
        weights.add(f"{attention}.q_a_proj", query, HIDDEN)
        weights.ones(f"{attention}.q_a_layernorm", query)
        weights.add(f"{attention}.q_b_proj", HEADS * (plain + rope), query)
        weights.add(f"{attention}.kv_a_proj_with_mqa", latent + rope, HIDDEN)
        weights.ones(f"{attention}.kv_a_layernorm", latent)
        weights.add(f"{attention}.kv_b_proj", HEADS * (plain + value), latent)
        weights.add(f"{attention}.o_proj", HIDDEN, HEADS * value, scale=scale)
        if dense:
            weights.mlp(f"{name}.mlp", 2 * HIDDEN, scale)
            return
        weights.add(f"{name}.mlp.gate", experts, HIDDEN)
        weights.tensors[f"{name}.mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
        for expert in range(experts):
            weights.mlp(f"{name}.mlp.experts.{expert}", HIDDEN, scale)
        weights.mlp(f"{name}.mlp.shared_experts", HIDDEN, scale)

    for number in range(LAYERS):
        layer(number, dense=number == 0)
    draft, tensors = f"model.layers.{LAYERS}", weights.tensors
    layer(LAYERS, dense=False)
    tensors[f"{draft}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{draft}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights.ones(f"{draft}.{norm}")
    weights.add(f"{draft}.eh_proj", HIDDEN, HIDDEN, scale=0.1 * scale)
    # The draft reads the last token, and little of what the model made of it.
    tensors[f"{draft}.eh_proj.weight"] = torch.cat([torch.eye(HIDDEN), tensors[f"{draft}.eh_proj.weight"]], dim=1)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": HEADS,
        "moe_intermediate_size": HIDDEN, "num_nextn_predict_layers": 1, "q_lora_rank": query, "kv_lora_rank": latent,
        "qk_rope_head_dim": rope, "qk_nope_head_dim": plain, "v_head_dim": value, "n_routed_experts": experts,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1,
        "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "aux_loss_alpha": 0.0, "ep_size": 1,
    }  # fmt: skip
    return weights, config


def shared_config() -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": BOS,
        "eos_token_id": EOS, "pad_token_id": EOS, "torch_dtype": "float32",
    }  # fmt: skip


def bytes_as_text() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def tokenizer() -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    words = [*SPECIALS, *bytes_as_text()]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": i, "content": word, **flags} for i, word in enumerate(SPECIALS)],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {word: i for i, word in enumerate(words)}, "merges": [],
        },
    }  # fmt: skip


def write(kind: str, out: Path) -> None:
    weights, config = {"qwen3": qwen3, "deepseek": deepseek}[kind]()
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights.tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    documents = {
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[BOS], "eos_token": SPECIALS[EOS],
            "unk_token": SPECIALS[0], "pad_token": SPECIALS[EOS], "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT, "chat_template": TEMPLATE,
        },
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS},
        "config.json": shared_config() | config,
    }  # fmt: skip
    for name, document in documents.items():
        (out / name).write_text(json.dumps(document, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
