"""Layouts by name: the sizes of real models, and clear refusals."""

import pytest

from pdhub.api.errors import ConfigError
from pdhub.api.layout import Order
from pdhub.measure.layouts import PRESETS, layout

# Bytes of one token of a real model's KV: layers × 2 × heads × dim × 2, or layers × row (+ indexer page / 64).
PER_TOKEN = {
    "smollm2-135m": 30 * 2 * 3 * 64 * 2,
    "llama-3.2-1b": 16 * 2 * 8 * 64 * 2,
    "llama-3.1-8b": 32 * 2 * 8 * 128 * 2,
    "llama-3.1-70b": 80 * 2 * 8 * 128 * 2,
    "qwen3-8b": 36 * 2 * 8 * 128 * 2,
    "deepseek-v3": 61 * 576 * 2,
    "deepseek-v3.2": 61 * (656 + 132),
}


def test_every_preset_is_checked_here():
    assert set(PER_TOKEN) == set(PRESETS)


@pytest.mark.parametrize(("name", "size"), PER_TOKEN.items())
def test_a_token_takes_what_the_model_says(name, size):
    assert layout(name).landing_bytes(6400) == 6400 * size


def test_custom_layouts_and_orders():
    made = layout("custom:block_bytes=100,layers=3,block_tokens=8", Order.LAYER_MAJOR)
    assert made.landing_bytes(17) == 3 * 3 * 100
    assert made.order is Order.LAYER_MAJOR


@pytest.mark.parametrize(
    "name", ["llama", "custom:", "custom:layers=3", "custom:layers=0,block_tokens=8,block_bytes=1"]
)
def test_other_words_are_refused(name):
    with pytest.raises(ConfigError, match="--layout"):
        layout(name)
