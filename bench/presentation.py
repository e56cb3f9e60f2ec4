"""What presenting one token costs: ``python bench/presentation.py [TOKENIZER]``.

TOKENIZER is a Hugging Face directory or a tokenizer.json; without one a small byte-level tokenizer is made. Prints the
median of several rounds, in microseconds a token, for a stream of one token an event.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pdhub.api import TokenChunk, TokenLogprob
from pdhub.router.presentation import Envelope, Presenter, TextDecoder, load_text_decoder

TEXT = "The quick brown fox jumps over the lazy dog; naïve café, 你好世界 😀.\n" * 40
ROUNDS = 15
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two stop strings": {"stop": ["\n\n\n", "</answer>"]},
    "5 logprobs": {"logprobs": True, "top_logprobs": 5},
}


def small_tokenizer() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    path = Path(tempfile.mkdtemp()) / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def token_ids(path: str) -> list[int]:
    from tokenizers import Tokenizer

    file = Path(path)
    return list(Tokenizer.from_file(str(file / "tokenizer.json" if file.is_dir() else file)).encode(TEXT).ids)


def run(text: TextDecoder, ids: list[int], body: dict[str, Any]) -> float:
    top = tuple((i, -float(i)) for i in range(5))
    logprobs = body.get("logprobs", False)
    items = [[TokenChunk((i,), (TokenLogprob(i, -0.5, top),) if logprobs else ())] for i in ids]
    envelope = Envelope("chatcmpl-0123456789abcdef", "model", 1_700_000_000, ids[:64])
    presenter = Presenter(text, envelope, endpoint="/v1/chat/completions", body={"stream": True, **body})
    start = time.perf_counter()
    for item in items:
        presenter.feed(item)
    return (time.perf_counter() - start) / len(ids) * 1e6


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else small_tokenizer()
    text = load_text_decoder(path)
    ids = token_ids(path)
    for name, body in CASES.items():
        print(f"{name:18} {statistics.median(run(text, ids, body) for _ in range(ROUNDS)):6.2f} µs/token")


if __name__ == "__main__":
    main()
