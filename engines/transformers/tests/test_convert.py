"""GGUF → directory, on a small file that the test writes as llama.cpp would."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from conftest import SHAPE, TEMPLATE
from pdhub_transformers.command import TransformersCommand
from pdhub_transformers.convert import convert_gguf
from pdhub_transformers.gguf_tokenizer import build_tokenizer
from pdhub_transformers.source import converted_path, model_directory
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdhub.api import ConfigError

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's own conversion does to query and key weights."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}  # fmt: skip
    if name in top:
        return top[name]
    _, _, layer, *middle, last = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(middle)]}.{last}"


def write_gguf(path, llama_dir, pre="smollm", arch="llama", extra=None):
    state = AutoModelForCausalLM.from_pretrained(llama_dir).float().state_dict()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokens += [f"[{n}]" for n in range(SHAPE["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, value in {**state, **(extra or {})}.items():
        array = value.numpy()
        heads = {"q_proj": SHAPE["num_attention_heads"], "k_proj": SHAPE["num_key_value_heads"]}
        for part, count in heads.items():
            if part in name:
                array = permuted(array, count)
        writer.add_tensor(name if name.startswith("extra") else gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf_file(llama_dir, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama_dir)


def test_weights_and_tokenizer_come_out_as_they_were(gguf_file, llama_dir, tmp_path):
    steps = []
    out = convert_gguf(gguf_file, tmp_path / "a" / "model", lambda done, total: steps.append((done, total)))
    assert steps == [(n + 1, len(steps)) for n in range(len(steps))]
    before = AutoModelForCausalLM.from_pretrained(llama_dir).float().state_dict()
    after = AutoModelForCausalLM.from_pretrained(out, local_files_only=True).float()
    assert all(torch.equal(before[name], value) for name, value in after.state_dict().items())
    assert after.generation_config.eos_token_id == 0
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert tokenizer.eos_token == "<|end|>"
    for text in ("ab cab", "a  12345", "😀 é\n\t x", "<|end|>ab"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<user>hi\n"
    assert list(out.parent.iterdir()) == [out], "the temporary directory is gone"


def test_digits_are_split_as_the_model_was_trained(gguf_file, tmp_path):
    """``smollm`` isolates each digit before anything else, so blanks in front of one stay together."""
    out = convert_gguf(gguf_file, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    words = [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")]
    assert words == ["a", "ĠĠ", "1", "2"]


def test_bfloat16_is_half_the_size(gguf_file, tmp_path):
    sizes = [
        (convert_gguf(gguf_file, tmp_path / dtype, dtype=dtype) / "model.safetensors").stat().st_size
        for dtype in ("float32", "bfloat16")
    ]
    assert sizes[1] < 0.6 * sizes[0]


def test_a_complete_directory_is_left_alone(gguf_file, tmp_path):
    out = convert_gguf(gguf_file, tmp_path / "model")
    (out / "note").touch()
    assert convert_gguf(gguf_file, out) == out
    assert (out / "note").exists()


def test_a_failure_leaves_nothing(gguf_file, tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(gguf_file, tmp_path / "model", stop)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_known_is_refused(llama_dir, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "junk.gguf").write_bytes(b"no gguf at all, but long enough for a header")
    cases = {
        "not known": write_gguf(tmp_path / "pre.gguf", llama_dir, pre="surprise"),
        "architecture": write_gguf(tmp_path / "arch.gguf", llama_dir, arch="falcon"),
        "no place": write_gguf(tmp_path / "extra.gguf", llama_dir, extra={"extra.weight": torch.ones(4)}),
        "readable": tmp_path / "junk.gguf",
        "not found": tmp_path / "none.gguf",
    }
    for message, path in cases.items():
        with pytest.raises(ConfigError, match=message):
            convert_gguf(path, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="exists"):
        convert_gguf(cases["not known"], tmp_path / "taken")


@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_every_known_pre_tokenizer_round_trips(pre):
    tokens = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    meta = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [], "tokenizer.ggml.token_type": [3], "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    tokenizer = build_tokenizer(meta)
    text = "It's  1234 words,\n\n\tévery 😀 one…"
    ids = tokenizer.encode(text).ids
    assert ids[0] == 0
    assert tokenizer.decode(ids[1:]) == text


def test_a_gguf_path_is_converted_once(gguf_file, tmp_path):
    out = model_directory(str(gguf_file), str(tmp_path))
    assert out == converted_path(gguf_file, str(tmp_path))
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    assert model_directory(str(gguf_file), str(tmp_path)) == out


def test_the_command(gguf_file, tmp_path, capsys):
    run = TransformersCommand().run
    assert run(["convert", str(gguf_file), str(tmp_path / "model"), "--dtype", "bfloat16"]) == 0
    assert (tmp_path / "model" / "config.json").is_file()
    assert run(["convert", str(tmp_path / "none.gguf"), str(tmp_path / "x")]) == 1
    assert "not found" in capsys.readouterr().err
    assert run(["convert", "--help"]) == 0
    assert "pdhub transformers convert model" in capsys.readouterr().out
    assert run([]) == 2
