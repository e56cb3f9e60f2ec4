"""Small tokenizers of every family, made here."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

LINES = [
    "Hello world, the quick brown fox jumps over the lazy dog. STOP here, please.",
    "naïve café, 你好世界, привет мир, 日本語のテキスト, emoji 😀 👩‍👩‍👧‍👦 e\u0301.",
    "def f(x):\n    return x + 1\n\n",
]


@pytest.fixture(scope="session")
def bytelevel() -> Tokenizer:
    """As Llama 3, Qwen and SmolLM2: 256 bytes, some merges, two special tokens, one added token that is none."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|start|>", "<|end|>"]
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken("<tool call é>", special=False)])
    return tokenizer


def _fallback(*steps: decoders.Decoder) -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for word in ("▁", "▁Hello", "▁world", ",", "a", "b", "é", "你", "好", "▁▁", "S", "TOP"):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *steps]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def llama() -> Tokenizer:
    """As Llama 2 and Mistral: the first space is dropped."""
    return _fallback(decoders.Strip(" ", 1, 0))


@pytest.fixture(scope="session")
def gemma() -> Tokenizer:
    """As Gemma: no space is dropped."""
    return _fallback()


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """A decoder that no table covers."""
    tokenizer = _fallback()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer
