"""The engine against the kit, with and without speculation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pdhub_transformers import plugin
from transformers import AutoModelForCausalLM

from pdhub.api import EngineSpec
from pdhub.testing import EngineConformance, PackageConformance


class TestTransformers(EngineConformance):
    @pytest.fixture
    def spec(self) -> EngineSpec:
        (spec,) = plugin.pdhub_register_engines()
        return spec

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"slots": 2, "chunk_tokens": 16}

    @pytest.fixture
    def model_path(self, llama_dir: Path) -> str:
        self.plain = AutoModelForCausalLM.from_pretrained(llama_dir).float()
        return str(llama_dir)

    def reference(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        options = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0}
        out = self.plain.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, len(prompt) :].tolist()


class TestTransformersWithSpeculation(TestTransformers):
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"slots": 2, "speculation": "prompt_lookup", "speculation_ngram_min": 1}


class TestPackage(PackageConformance):
    distribution = "pdhub-transformers"
