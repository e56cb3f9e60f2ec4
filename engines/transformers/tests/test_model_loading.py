"""What is loaded, what is refused, and that registering stays light."""

from __future__ import annotations

import json

import pytest
from conftest import make_model
from pdhub_transformers.config import TransformersConfig
from pdhub_transformers.model import load_model
from pdhub_transformers.operate import TransformersOperate
from pydantic import ValidationError

from pdhub.api import ConfigError, EngineContext, Topology
from pdhub.testing.memory import MemoryTransport


def load(path, **options):
    return load_model(TransformersConfig(**options), EngineContext(MemoryTransport(), 1, path and str(path)))


def test_the_layout_is_the_models(llama_dir):
    model = load(llama_dir, block_tokens=8, dtype="bfloat16", chunk_tokens=64)
    (group,) = model.layout.groups
    assert group.axes == ("kv:2", "head:2", "token:8", "dim:8")
    assert (group.block_bytes, group.dtype, len(group.layers)) == (2 * 2 * 8 * 8 * 2, "bfloat16", 3)
    assert model.eos_token_ids == (300,)
    assert model.max_context == 256


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mistral", {"sliding_window": 32}),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    ],
)
def test_models_without_a_plain_cache_are_refused(tmp_path, family, changes):
    with pytest.raises(ConfigError, match="cannot serve"):
        load(make_model(tmp_path, family, **changes))


def test_missing_models_say_what_to_do(tmp_path):
    for path in (None, tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(ConfigError, match=r"model\.path"):
            load(path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="cannot load"):
        load(tmp_path)


def test_more_context_than_the_model_has_is_refused(llama_dir):
    with pytest.raises(ConfigError, match="max_context"):
        load(llama_dir, max_context=257)


@pytest.mark.parametrize(
    "options",
    [{"chunk_tokens": 500}, {"slots": 0}, {"dtype": "int8"}, {"unknown": 1}, {"device": "tpu"},
     {"speculation_ngram_min": 9}],
    ids=str,
)  # fmt: skip
def test_bad_options_are_refused(options):
    with pytest.raises(ValidationError):
        TransformersConfig(**options)


def test_checks_find_a_missing_model(llama_dir, tmp_path):
    operate = TransformersOperate(TransformersConfig())

    def findings(path):
        return [f.severity for f in operate.checks(Topology("m", path and str(path), (), "shm"))]

    assert findings(llama_dir) == []
    assert findings(tmp_path) == findings(None) == ["error"]
    (tmp_path / "config.json").write_text("{}")
    assert findings(tmp_path) == ["warning"]
