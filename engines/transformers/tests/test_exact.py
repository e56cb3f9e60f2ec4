"""Rows of a batch are computed as if each were alone."""

from __future__ import annotations

import pytest
import torch
from pdhub_transformers import exact
from pdhub_transformers.attention import Feed
from pdhub_transformers.config import TransformersConfig
from pdhub_transformers.model import load_model
from pdhub_transformers.rows import Row
from support import prompt_of
from torch import nn

from pdhub.api import EngineContext
from pdhub.testing.memory import MemoryTransport


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "one after another"])
@torch.inference_mode()
def test_linear_rows_equal_lone_rows(bias, batched, monkeypatch):
    torch.manual_seed(1)
    plain = nn.Linear(96, 160, bias=bias)
    value = torch.randn(5, 1, 96)
    expected = torch.cat([plain(row) for row in value.split(1)])
    if not batched:
        monkeypatch.setattr(exact, "_holds", lambda layer, rows: False)
    model = nn.Sequential(plain)
    assert exact.make_exact(model, 8) is (batched and exact._holds(plain, 5))
    assert torch.equal(model(value), expected)


@torch.inference_mode()
def test_logits_do_not_depend_on_the_batch(family_dir):
    """Every row of a step of several requests, and every guess behind one, has the bits of a lone step."""
    context = EngineContext(MemoryTransport(), 2, str(family_dir))
    model = load_model(TransformersConfig(), context, exact_rows=8)
    prompts = [prompt_of(5 + 6 * n, n) for n in range(5)]
    rows = [Row(model.geometry, 64) for _ in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        model.chunk(Feed(row, 0, prompt))
    feeds = [Feed(row, len(prompt), (11,)) for row, prompt in zip(rows, prompts, strict=True)]
    together = model.decode(feeds)
    assert torch.equal(together, torch.cat([model.decode([feed]) for feed in feeds]))
    guesses = (11, 5, 90, 17)
    at_once = model.decode([Feed(rows[0], len(prompts[0]), guesses)])
    single = [model.decode([Feed(rows[0], len(prompts[0]) + i, (token,))]) for i, token in enumerate(guesses)]
    assert torch.equal(at_once, torch.cat(single))
