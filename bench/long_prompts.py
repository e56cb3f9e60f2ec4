"""What router and node add to the time to the first token of a long prompt.

    python bench/long_prompts.py [--tokens 1000 4000 16000 32000] [--runs 21] [--against CHECKOUT] [--json FILE]

Router and node run as processes, the node with an engine that costs nothing; this process is the client, and a vLLM
server whose prompts are computed and handed over already. So there is nothing but pdhub between these moments:

* **before**: from the client's request to the complete body at the prefill server (parse, choose, claim, rewrite);
* **after**: from the prefill server's answer to the first event at the client (read, decode call, its frames, present).

``router_cpu`` and ``node_cpu`` are the processor time that a request takes until its end; they hardly depend on what
else the machine does. Kinds: ``ids`` are token ids, ``told`` the same with ``return_token_ids``, so that the first
event has the whole prompt, ``text`` is a chat message of four characters a token.

``--against`` names another checkout, whose router and node run beside these; requests alternate, and the ratio of the
medians is given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml
from peers.ready_vllm import ReadyVLLM

from pdhub.operate.ports import free_port
from pdhub.testing import toy

BENCH = Path(__file__).parent
HERE = BENCH.parent
KINDS = ("ids", "told", "text")
MODEL = "blank"
OUTPUT = 4
next_port = partial(free_port, "127.0.0.1", set(), random.Random())
"""A port that is free now, and another one each time."""


class Side:
    """Router and node of one checkout, and their prefill server."""

    def __init__(self, checkout: Path, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.vllm = ReadyVLLM(MODEL)
        self._checkout, self._log = checkout, directory / "log"
        self._path = directory / "long.yaml"
        self._router, self._prefill, self._connector = next_port(), next_port(), next_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = f"http://127.0.0.1:{self._router}"
        engine = {"handoff": "pdhub", "pdhub_port": self._connector, "slots": 8, "max_context": 65_536}
        document = {
            "model": {"name": MODEL, "tokenizer": str(toy.write_tokenizer(directory / "tokenizer"))},
            "plugins": {"modules": ["peers.blank_engine"]},
            "router": {"port": self._router, "probe_interval_s": 2.0, "pair_check": False},
            "handoff": {"transport": {"type": "tcp"}},
            "prefill": [
                {
                    "name": "prefill-0",
                    "port": self._prefill,
                    "launch": False,
                    "engine": {"type": "vllm", "config": engine},
                }
            ],
            "pools": [
                {
                    "name": "nodes",
                    "engine": {"type": "blank"},
                    "nodes": [{"name": "node-0", "port": next_port(), "control_port": next_port()}],
                }
            ],
            "policy": {"type": "slo"},
        }
        self._path.write_text(yaml.safe_dump(document))

    async def start(self, http: aiohttp.ClientSession) -> None:
        await self.vllm.start(self._prefill, self._connector)
        self._launch()
        async with asyncio.timeout(60):
            while not await self._ready(http):
                if any(process.poll() is not None for process in self._processes):
                    raise SystemExit(self._log.read_text())
                await asyncio.sleep(0.1)

    def _launch(self) -> None:
        path = (self._checkout, *sorted(self._checkout.glob("engines/*/src")), BENCH)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
        log = self._log.open("ab")
        for verb in (["node", str(self._path), "node-0"], ["router", str(self._path)]):
            argv = [sys.executable, "-m", "pdhub", *verb]
            self._processes.append(subprocess.Popen(argv, stdout=log, stderr=log, env=env, cwd=self._checkout))

    async def _ready(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with http.get(self.url + "/ready") as reply:
                return reply.status == 200
        except aiohttp.ClientError:
            return False

    async def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            await asyncio.to_thread(process.wait, 20)
        await self.vllm.close()

    def cpu_ms(self) -> list[float]:
        """Processor time so far, of node and router."""
        return [1e-6 * time.clock_gettime_ns(_clock_of(process.pid)) for process in self._processes]


def _clock_of(pid: int) -> int:
    """What ``clock_getcpuclockid`` gives on Linux. psutil knows the same in steps of 10 ms."""
    return (~pid << 3) | 2


def request_of(kind: str, tokens: int, rng: random.Random) -> tuple[str, bytes, list[int]]:
    """Path, body, and the prompt's ids."""
    ids = [rng.randrange(1000, 100_000) for _ in range(tokens)]
    body: dict[str, Any] = {"model": MODEL, "max_tokens": OUTPUT, "temperature": 0, "stream": True, "ignore_eos": True}
    if kind == "text":
        words = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz    ,.\n") for _ in range(4 * tokens))
        return (
            "/v1/chat/completions",
            msgspec.json.encode({**body, "messages": [{"role": "user", "content": words}]}),
            ids,
        )
    if kind == "told":
        body["return_token_ids"] = True
    return "/v1/completions", msgspec.json.encode({**body, "prompt": ids}), ids


async def one(http: aiohttp.ClientSession, side: Side, asked: tuple[str, bytes, list[int]]) -> dict[str, float]:
    """Milliseconds of one request."""
    path, body, side.vllm.prompt = asked
    first = None
    busy = side.cpu_ms()
    begin = time.monotonic()
    async with http.post(side.url + path, data=body, headers={"content-type": "application/json"}) as reply:
        if reply.status != 200:
            raise SystemExit(f"{reply.status} {await reply.text()}")
        async for line in reply.content:
            if b'"error"' in line:
                raise SystemExit(line.decode())
            if first is None and line.startswith(b"data: {"):
                first = time.monotonic()
    if first is None:
        raise SystemExit("an answer without an event")
    await asyncio.sleep(0.01)  # the node gives the landing back
    node, router = (now - before for now, before in zip(side.cpu_ms(), busy, strict=True))
    before, after = 1000 * (side.vllm.asked - begin), 1000 * (first - side.vllm.answered)
    return {
        "before_ms": before,
        "after_ms": after,
        "both_ms": before + after,
        "router_cpu_ms": router,
        "node_cpu_ms": node,
    }


async def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    sides = {"this": Side(HERE, directory / "this")}
    if args.against:
        sides["other"] = Side(args.against.resolve(), directory / "other")
    begun = os.getloadavg()[0]
    rng, rows = random.Random(1), []
    async with aiohttp.ClientSession(read_bufsize=8 << 20, timeout=aiohttp.ClientTimeout(total=60)) as http:
        try:
            for side in sides.values():
                await side.start(http)
            for kind in args.kinds:
                for tokens in args.tokens:
                    rows.append(await compare(http, sides, kind, tokens, args.runs, rng))
                    print(line_of(rows[-1]), flush=True)
        finally:
            for side in sides.values():
                await side.stop()
    return {
        "what": "milliseconds that router and node add to the time to the first token; see bench/long_prompts.py",
        "machine": f"{os.cpu_count()} cores, Python {sys.version.split()[0]}",
        "load_average": [round(load, 1) for load in (begun, os.getloadavg()[0])],
        "runs": args.runs,
        "rows": rows,
    }


async def compare(
    http: aiohttp.ClientSession, sides: dict[str, Side], kind: str, tokens: int, runs: int, rng: random.Random
) -> dict[str, Any]:
    """Medians of one kind and length. The first two requests of each side do not count."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(runs + 2):
        asked = request_of(kind, tokens, rng)
        for name in rng.sample(list(sides), len(sides)):
            found[name].append(await one(http, sides[name], asked))
    row: dict[str, Any] = {"kind": kind, "tokens": tokens}
    for name, times in found.items():
        row[name] = {key: round(statistics.median(t[key] for t in times[2:]), 2) for key in times[0]}
    if "other" in row:
        row["ratio"] = {key: round(value / row["other"][key], 3) for key, value in row["this"].items()}
    return row


def line_of(row: dict[str, Any]) -> str:
    parts = [f"{row['kind']:4} {row['tokens']:6}"]
    for name in ("other", "this"):
        if name in row:
            parts.append(f"{name}: " + "  ".join(f"{key[:-3]} {value:6.2f}" for key, value in row[name].items()))
    if "ratio" in row:
        parts.append(
            "ratio " + "  ".join(f"{row['ratio'][key]:.2f}" for key in ("both_ms", "router_cpu_ms", "node_cpu_ms"))
        )
    return "   ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000, 16_000, 32_000])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = asyncio.run(measure(args, Path(directory)))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
