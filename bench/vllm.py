"""What pdhub's router adds in front of real vLLM servers, and push against pull.

One run, one tree of servers (those of ``tests/vllm``: tiny Qwen3 on the CPU), five ways to the same answer:

* ``direct``: a vLLM server that prefills itself; ``routed``: the same server through pdhub;
* ``toy``: prefill and decode through what vLLM's toy proxy does (``peers/toy_proxy.py``);
  ``pull``: the same two servers through pdhub; ``push``: two others, with NixlPushConnector, through pdhub.

Every round asks each way in an order of chance, ``c`` streams at once, each with a prompt of its own that no cache has.
*Added* is the median of the differences between neighbours of one round, and the difference of the 99th percentiles.

    PDHUB_VLLM_VENV=DIR python bench/vllm.py [--rounds 60] [--prompt 256] [--tokens 32] [--out bench/results/vllm.json]

DIR is made by ``make test-vllm``. ``load_before`` in the record says how busy the machine was: a difference of
milliseconds wants an idle one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "vllm"
sys.path.insert(0, str(TESTS))

PAIRS = {"router in front of one server": ("direct", "routed"), "pdhub in place of the toy proxy": ("toy", "pull")}
POOLS = ("pull", "push", "whole")

Taken = tuple[float, float]
"""TTFT and TPOT of one stream, ms."""


async def stream(session: aiohttp.ClientSession, url: str, headers: dict[str, str], body: dict[str, Any]) -> Taken:
    began = time.perf_counter()
    times = []
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        async for raw in reply.content:
            if raw.startswith(b"data: {") and b'"choices":[{' in raw:
                times.append(time.perf_counter())
    assert len(times) > 1, "no stream"
    return (times[0] - began) * 1000, (times[-1] - times[0]) * 1000 / (body["max_tokens"] - 1)


async def measure(ways: dict[str, tuple[str, dict[str, str]]], args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(7)
    out = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(way: str) -> Taken:
            prompt = [rng.randrange(3, 250) for _ in range(args.prompt)]
            body = {
                "model": "m", "prompt": prompt, "max_tokens": args.tokens, "ignore_eos": True, "temperature": 0,
                "stream": True,
            }  # fmt: skip
            return await stream(session, *ways[way], body)

        for concurrency in args.concurrency:
            taken: dict[str, list[list[Taken]]] = defaultdict(list)
            for number in range(-3, args.rounds):
                for way in rng.sample(list(ways), len(ways)):
                    found = await asyncio.gather(*(ask(way) for _ in range(concurrency)))
                    if number >= 0:  # the first ones connect and shake hands
                        taken[way].append(found)
            out[f"c={concurrency}"] = summary(taken)
    return out


def summary(taken: dict[str, list[list[Taken]]]) -> dict[str, Any]:
    ttft = {way: [t for found in rounds for t, _ in found] for way, rounds in taken.items()}
    rows: dict[str, Any] = {}
    for way, rounds in taken.items():
        tpot = [t for found in rounds for _, t in found]
        rows[way] = {
            "n": len(tpot),
            "ttft_p50_ms": statistics.median(ttft[way]),
            "ttft_p99_ms": p99(ttft[way]),
            "tpot_p50_ms": statistics.median(tpot),
        }
    middle = {way: [statistics.median(t for t, _ in found) for found in rounds] for way, rounds in taken.items()}
    for what, (plain, ours) in PAIRS.items():
        differences = [b - a for a, b in zip(middle[plain], middle[ours], strict=True)]
        rows[what] = {
            "added_ttft_p50_ms": statistics.median(differences),
            "added_ttft_p99_ms": p99(ttft[ours]) - p99(ttft[plain]),
            "tpot_ratio": rows[ours]["tpot_p50_ms"] / rows[plain]["tpot_p50_ms"],
        }
    ratios = [b / a for a, b in zip(middle["pull"], middle["push"], strict=True)]
    rows["push over pull"] = {"ttft_ratio_p50": statistics.median(ratios)}
    return rows


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


@contextlib.contextmanager
def proxy(python: Path, prefill: str, decode: str, port: int) -> Iterator[str]:
    """With vLLM's own environment, as its users run it."""
    script = ROOT / "bench" / "peers" / "toy_proxy.py"
    running = subprocess.Popen([str(python), str(script), str(port), prefill, decode])
    try:
        from calls import get
        from world import wait_for

        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: get(f"{url}/healthcheck")[0] == 200, 60, lambda: "the toy proxy does not answer")
        yield url
    finally:
        running.terminate()
        running.wait(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    venv = os.environ.get("PDHUB_VLLM_VENV")
    if venv is None:
        print("PDHUB_VLLM_VENV is not set: no vLLM to measure (make test-vllm makes one)")
        return 0
    from topology import Ports
    from world import World

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        model, python = Path(directory) / "model", Path(venv).absolute() / "bin" / "python"
        subprocess.run([sys.executable, str(TESTS / "tools" / "tiny_models.py"), "qwen3", str(model)], check=True)
        world = World("tiny", POOLS, model, python.with_name("vllm"), Path(directory))
        try:
            world.start()
            pull, prefill = world.server("pull"), world.server("prefill-pull")
            with proxy(python, prefill.url, pull.url, Ports().take()) as toy:
                ways = {
                    "direct": (world.single.url, {}),
                    "routed": (world.router_url, world.via("whole")),
                    "toy": (toy, {}),
                    "pull": (world.router_url, world.via("pull")),
                    "push": (world.router_url, world.via("push")),
                }
                found = asyncio.run(measure(ways, args))
        finally:
            world.close()
    record = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load_before": load,
        "rounds": args.rounds,
        "prompt_tokens": args.prompt,
        "output_tokens": args.tokens,
        **found,
    }
    text = json.dumps(json.loads(json.dumps(record), parse_float=lambda number: round(float(number), 3)), indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
