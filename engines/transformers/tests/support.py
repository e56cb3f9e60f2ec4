"""What several tests need: an engine that runs, and plain generation to compare with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from pdhub_transformers import plugin
from pdhub_transformers.config import TransformersConfig
from transformers import AutoModelForCausalLM

from pdhub.testing.drive import EngineDriver


@asynccontextmanager
async def running(directory: Path, **options: Any) -> AsyncIterator[EngineDriver]:
    """Both facets over one in-memory transport."""
    (spec,) = plugin.pdhub_register_engines()
    driver = EngineDriver(spec, TransformersConfig(**options), str(directory))
    await driver.start()
    try:
        yield driver
    finally:
        await driver.close()


class Plain:
    """``model.generate`` without any of this package."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True).float().eval()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Exactly ``count`` tokens; the end of sequence is banned, as ``min_tokens`` does."""
        ids = torch.tensor([list(prompt)])
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """``[tokens, vocabulary]`` of one pass over everything."""
        return self.model(torch.tensor([list(tokens)])).logits[0].float()


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids of the byte alphabet, with some repetition."""
    return tuple((7 * n * (1 + seed % 3) + seed * 13 + (n * n) % 5) % 200 for n in range(length))
