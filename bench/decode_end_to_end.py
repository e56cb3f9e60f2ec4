"""Decode speed through the whole of pdhub over plain ``model.generate``, in one run.

    python bench/decode_end_to_end.py --model DIR [--tokens 128] [--runs 5] [--threads 1] [--json]

Starts prefill, one node with one slot (no speculation) and the router as processes, then alternates: one streamed
request through the router, one ``generate`` in this process, both greedy, in float32, with the same number of
threads. Decode speed is (tokens − 1) / (last token − first token); for ``generate`` the time of the first token is
taken from a streamer. The figure to quote is the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from pdhub.operate.ports import free_port

PROMPT = "Write a long story about a lighthouse keeper who finds a message in a bottle. "
next_port = partial(free_port, "127.0.0.1", set(), random.Random())
"""A port that is free now, and another one each time."""


def configuration(model: str, threads: int) -> dict[str, Any]:
    engine = {"type": "transformers", "config": {"dtype": "float32", "slots": 1}}
    return {
        "model": {"name": "bench", "path": model},
        "router": {"port": next_port()},
        "prefill": [
            {
                "name": "prefill-0",
                "port": next_port(),
                "threads": threads,
                "engine": {"type": "transformers", "config": {"dtype": "float32"}},
            }
        ],
        "pools": [
            {
                "name": "only",
                "engine": engine,
                "nodes": [{"name": "only-0", "port": next_port(), "control_port": next_port(), "threads": threads}],
            }
        ],
        "policy": {"type": "slo_threshold", "config": {"tpot_below_ms": 1, "fast": "only", "otherwise": "only"}},
    }


def through_pdhub(url: str, tokens: int) -> float:
    """Tokens a second of one streamed request."""
    body: dict[str, Any] = {"model": "bench", "prompt": PROMPT, "temperature": 0, "stream": True}
    body |= {"max_tokens": tokens, "min_tokens": tokens}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    times = []
    with urllib.request.urlopen(request, timeout=300) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    return (tokens - 1) / (times[-1] - times[0])


class Plain:
    """``model.generate`` in this process."""

    def __init__(self, model: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
        self.ids = AutoTokenizer.from_pretrained(model, local_files_only=True)(PROMPT, return_tensors="pt")

    def __call__(self, tokens: int) -> float:
        times: list[float] = []

        class Stamp:
            def put(self, value: Any) -> None:
                times.append(time.perf_counter())

            def end(self) -> None:
                return None

        with self.torch.inference_mode():
            self.model.generate(
                **self.ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, streamer=Stamp()
            )
        first, last = times[1], times[-1]  # the first put is the prompt
        return (len(times) - 2) / (last - first)


def wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"pdhub up ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("pdhub did not become ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = configuration(args.model, args.threads)
    url = f"http://127.0.0.1:{config['router']['port']}"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "bench.yaml"
        path.write_text(yaml.safe_dump(config))
        log = (Path(directory) / "log").open("wb")
        process = subprocess.Popen([sys.executable, "-m", "pdhub", "up", str(path)], stdout=log, stderr=log)
        try:
            plain = Plain(args.model, args.threads)
            wait(url, process)
            through_pdhub(url, 16)
            plain(16)
            rows = [(through_pdhub(url, args.tokens), plain(args.tokens)) for _ in range(args.runs)]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
            log.close()
    ratios = [a / b for a, b in rows]
    result = {
        "what": "decode tokens/s, one stream, float32, greedy",
        "machine": f"{platform.machine()}, {os.cpu_count()} cpus, Python {platform.python_version()}",
        "threads": args.threads,
        "tokens": args.tokens,
        "pdhub_tokens_s": statistics.median(a for a, _ in rows),
        "generate_tokens_s": statistics.median(b for _, b in rows),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "goal": 0.95,
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return
    table = Table("", "tokens/s (median)", title=result["what"])
    table.add_row("through pdhub", f"{result['pdhub_tokens_s']:.1f}")
    table.add_row("model.generate", f"{result['generate_tokens_s']:.1f}")
    table.add_row("ratio", f"{result['ratio_median']:.2f}  ({result['ratio_min']:.2f} to {result['ratio_max']:.2f})")
    Console().print(table)


if __name__ == "__main__":
    main()
