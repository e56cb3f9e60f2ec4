"""What the router reads of a model's own files."""

import json

import pytest

from pdhub.api.errors import ConfigError
from pdhub.router.generation import Generation, load_generation


def write(tmp_path, document):
    (tmp_path / "generation_config.json").write_text(document if isinstance(document, str) else json.dumps(document))
    return load_generation(str(tmp_path))


def test_defaults_and_ends(tmp_path):
    found = write(
        tmp_path, {"temperature": 0.6, "top_k": 20, "eos_token_id": [3, 4], "max_new_tokens": 7, "top_p": None}
    )
    assert found == Generation({"temperature": 0.6, "top_k": 20.0}, frozenset({3, 4}))
    assert write(tmp_path, {"eos_token_id": 5}).eos_token_ids == {5}
    assert write(tmp_path, {"do_sample": False, "temperature": 0.6}).sampling == {"temperature": 0.0}


def test_nothing_there_is_nothing_known(tmp_path):
    assert load_generation(str(tmp_path)) == Generation()
    (tmp_path / "tokenizer.json").touch()
    write(tmp_path, {"top_p": 0.5})
    assert load_generation(str(tmp_path / "tokenizer.json")).sampling == {"top_p": 0.5}


@pytest.mark.parametrize("document", ["", "[]", "{", {"eos_token_id": ["x"]}, {"eos_token_id": {"a": 1}}])
def test_what_cannot_be_read_is_said(tmp_path, document):
    with pytest.raises(ConfigError):
        write(tmp_path, document)
