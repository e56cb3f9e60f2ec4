"""What pdhub's connector costs inside a real vLLM prefill instance, on the CPU, with the servers of ``tests/vllm``.

* ``mixed``: one instance under MultiConnector serves a pool of vLLM (NIXL pull) and one of `pdhub node`s. Half of the
  requests are the native pool's, and their time to the first token counts. The other half is in turn for pdhub nodes,
  ordinary requests that the instance alone answers, or the native pool's too. Companions ask for one token: here all
  servers share the cores, and a node's decoding would count against prefill.
* ``exposed``: from the complete prefill answer to the begin of the node's first decode step, for 256 and for 2,048
  tokens in turns. At that moment the node tells the first token, which is prefill's.
* ``unused``: two instances, one with the connector and one without, that no request hands anything over from; prompt
  tokens a second, and a second of processor time of the instance, in the order A B B A. ``noise`` is the second B over
  the first.

    PDHUB_VLLM_VENV=DIR python bench/connector.py [--part mixed …] [--model tiny] [--rounds 30] [--out FILE]

DIR is made by ``make test-vllm``. ``--out`` keeps the parts of FILE that were not measured again. ``load_before`` says
how busy the machine was; only ratios of one part are comparable. On a busy one, the quickest quarter of hand-overs and
processor time are closer to the truth than medians and seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "vllm"
sys.path.insert(0, str(TESTS))

GOALS = {"mixed": "ratio 1", "exposed": "ratio at most 1.3", "unused": "ratio at least 0.98"}
CHUNK = 256
SHORT, LONG = 256, 2048
TOKENS = 16

Json = dict[str, Any]


class Client:
    """Requests of one run. Prompts are random, so that no cache knows them."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._rng = random.Random(7)

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(3, 250) for _ in range(tokens)]

    def shuffled(self, items: list[str]) -> list[str]:
        return self._rng.sample(items, len(items))

    async def stream(self, url: str, tokens: int, headers: dict[str, str]) -> float:
        """Seconds to the first of 16 tokens."""
        body = self._body(tokens, TOKENS) | {"stream": True}
        began, first = time.perf_counter(), 0.0
        async with self._http.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            async for raw in reply.content:
                if not first and raw.startswith(b"data: {") and b'"choices":[{' in raw:
                    first = time.perf_counter()
        assert first, "no stream"
        return first - began

    async def one(self, url: str, tokens: int, headers: dict[str, str]) -> None:
        """One token."""
        await self._json(f"{url}/v1/completions", self._body(tokens, 1), headers)

    async def handed(self, prefill: str, node: str, fingerprint: str, tokens: int) -> tuple[float, float]:
        """The two legs as a router sends them: exposed seconds, and those from the decode call to usable KV."""
        prompt = self.prompt(tokens)
        claim = {"transfer_id": uuid.uuid4().hex, "request_id": "bench", "tokens": tokens, "max_tokens": TOKENS}
        mine = await self._json(f"{node}/claim", claim | {"fingerprint": fingerprint}, {})
        params = {name: mine[name] for name in ("transfer_id", "generation", "host", "port", "fingerprint")}
        body = self._body(tokens, 1) | {"prompt": prompt, "kv_transfer_params": {"pdhub": params}}
        answer = await self._json(f"{prefill}/v1/completions", body, {})
        prefilled = time.perf_counter()
        assert "error" not in answer["kv_transfer_params"]["pdhub"], answer
        decode = {name: params[name] for name in ("transfer_id", "generation")} | {
            "request_id": "bench", "prompt_token_ids": prompt, "first_token": answer["choices"][0]["token_ids"][0],
            "max_tokens": TOKENS, "sampling": {"temperature": 0.0}, "ignore_eos": True,
        }  # fmt: skip
        times, told = [], 0.0
        async with self._http.post(f"{node}/decode", data=msgspec.json.encode(decode)) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                frame = json.loads(line)
                assert "error" not in frame, frame
                told = frame["s"]["handoff_ms"] / 1000 if "s" in frame else told
                times += [time.perf_counter()] * len(frame.get("t", ()))
        return times[0] - prefilled, told

    def _body(self, tokens: int, most: int) -> Json:
        return {
            "model": "m", "prompt": self.prompt(tokens), "max_tokens": most, "ignore_eos": True, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip

    async def _json(self, url: str, body: Json, headers: dict[str, str]) -> Json:
        async with self._http.post(url, json=body, headers=headers) as reply:
            assert reply.status == 200, f"{url}: {await reply.text()}"
            return dict(await reply.json())


async def mixed(client: Client, world: Any, rounds: int) -> Json:
    """Native time to the first token beside three kinds of companions."""
    natives, native, nodes = 3, world.via("pull"), world.via("nodes")
    companions: dict[str, Callable[[], Any]] = {
        "pdhub": lambda: client.one(world.router_url, SHORT, nodes),
        "plain": lambda: client.one(world.prefill.url, SHORT, {}),
        "native": lambda: client.one(world.router_url, SHORT, native),
    }
    taken: dict[str, list[float]] = defaultdict(list)
    for number in range(-3, rounds):
        for kind in client.shuffled(list(companions)):
            mine = [client.stream(world.router_url, SHORT, native) for _ in range(natives)]
            found = await asyncio.gather(*mine, *(companions[kind]() for _ in range(natives)))
            if number >= 0:  # the first ones connect and shake hands
                taken[kind].append(statistics.mean(found[:natives]) * 1000)
    return {
        "prompt_tokens": SHORT,
        "native_at_once": natives,
        "native_ttft_p50_ms": {kind: statistics.median(times) for kind, times in taken.items()},
        "ratio_beside_plain": paired(taken["pdhub"], taken["plain"]),
        "ratio_beside_native": paired(taken["pdhub"], taken["native"]),
        "noise_native_over_plain": paired(taken["native"], taken["plain"]),
    }


async def exposed(client: Client, world: Any, rounds: int) -> Json:
    """Short and long prompts in turns."""
    from calls import get

    fingerprint = json.loads(get(world.prefill_told)[1])["fingerprint"]
    taken: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for number in range(-2, rounds):
        for tokens in (SHORT, LONG):
            found = await client.handed(world.prefill.url, world.node_url, fingerprint, tokens)
            if number >= 0:
                taken[tokens].append(found)
    middle = {n: [statistics.median(part) * 1000 for part in zip(*found, strict=True)] for n, found in taken.items()}
    return {
        "chunk_tokens": CHUNK,
        "exposed_p50_ms": {str(tokens): found[0] for tokens, found in middle.items()},
        "of_it_in_the_node_p50_ms": {str(tokens): found[1] for tokens, found in middle.items()},
        "ratio": middle[LONG][0] / middle[SHORT][0],
        "quickest_quarter_p50_ms": {str(tokens): quick(found) * 1000 for tokens, found in taken.items()},
        "ratio_of_quickest": quick(taken[LONG]) / quick(taken[SHORT]),
    }


def quick(found: list[tuple[float, float]]) -> float:
    """Median of the quickest quarter's exposed seconds."""
    ordered = sorted(exposed for exposed, _ in found)
    return statistics.median(ordered[: -(-len(ordered) // 4)])


async def unused(client: Client, servers: dict[str, tuple[str, int]], rounds: int) -> Json:
    """Prompt tokens a second with the connector and without."""
    count, at_once = 12, 3
    taken: dict[str, list[float]] = {"with": [], "without": []}
    worked: dict[str, list[float]] = {"with": [], "without": []}
    noise, noise_worked = [], []

    async def speed(which: str) -> tuple[float, float]:
        url, pid = servers[which]
        gate = asyncio.Semaphore(at_once)

        async def ask() -> None:
            async with gate:
                await client.one(url, 2 * CHUNK, {})

        work, began = processor_s(pid), time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(count)))
        tokens = count * 2 * CHUNK
        return tokens / (time.perf_counter() - began), tokens / (processor_s(pid) - work)

    for number in range(-1, rounds):
        a, b, c, d = [await speed(which) for which in ("with", "without", "without", "with")]
        if number >= 0:
            for found, i in ((taken, 0), (worked, 1)):
                found["with"].append((a[i] + d[i]) / 2)
                found["without"].append((b[i] + c[i]) / 2)
            noise.append(c[0] / b[0])
            noise_worked.append(c[1] / b[1])
    return {
        "prompt_tokens": 2 * CHUNK,
        "requests_a_turn": count,
        "at_once": at_once,
        "tokens_s_p50": {which: statistics.median(found) for which, found in taken.items()},
        "ratio": paired(taken["with"], taken["without"]),
        "noise": statistics.median(noise),
        "tokens_a_processor_s_p50": {which: statistics.median(found) for which, found in worked.items()},
        "processor_ratio": paired(worked["with"], worked["without"]),
        "processor_noise": statistics.median(noise_worked),
    }


def processor_s(pid: int) -> float:
    """Of a server and its engine, so far."""
    server = psutil.Process(pid)
    return sum(t.user + t.system for t in (p.cpu_times() for p in [server, *server.children(recursive=True)]))


def paired(ours: list[float], theirs: list[float]) -> float:
    """Median of the ratios of neighbours."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


@contextlib.contextmanager
def tree(kind: str, model: Path, vllm: Path, directory: Path) -> Iterator[Any]:
    """One prefill instance for a native pool and for nodes. No digests: they cost what they check."""
    from kinds import KINDS
    from pdhub_worlds import TREES, PDHubWorld, with_nodes

    KINDS["bench"] = replace(KINDS[kind], context=LONG + 256, kv="512M" if kind == "smol" else "128M", watched=False)
    change = with_nodes(replace(TREES["mixed"], kind="bench", chunk=CHUNK), alone=False)

    def quick(document: Json) -> None:
        change(document)
        document["handoff"]["verify"] = False

    world = PDHubWorld("bench", ("pull", "whole"), model, vllm, directory, quick)
    try:
        world.start()
        yield world
    finally:
        world.close()


@contextlib.contextmanager
def pair(model: Path, vllm: Path, directory: Path) -> Iterator[dict[str, tuple[str, int]]]:
    """Two instances, with and without the connector: address and process of each."""
    from calls import get
    from kinds import SERVER_ARGS, SERVER_ENV
    from topology import Ports
    from world import wait_for

    ports, found, running = Ports(), {}, []
    transfer = {
        "kv_connector": "PDHubConnector", "kv_connector_module_path": "pdhub.connector.vllm",
        "kv_role": "kv_producer", "kv_connector_extra_config": {"transport": "shm", "port": ports.take()},
    }  # fmt: skip
    try:
        for which, more in (("with", ["--kv-transfer-config", json.dumps(transfer)]), ("without", [])):
            port = ports.take()
            command = [
                str(vllm), "serve", str(model), "--served-model-name", "m", "--port", str(port), "--host", "127.0.0.1",
                "--max-model-len", "2048", "--max-num-batched-tokens", str(CHUNK), "--kv-cache-memory-bytes", "256M",
                *SERVER_ARGS, *more,
            ]  # fmt: skip
            env = {**os.environ, **SERVER_ENV, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS / "shims")}
            with (directory / f"{which}.log").open("wb") as log:
                running.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
            found[which] = (f"http://127.0.0.1:{port}", running[-1].pid)
        for which, (url, _) in found.items():
            path = directory / f"{which}.log"
            wait_for(lambda url=url: get(f"{url}/health")[0] == 200, 600, lambda p=path: p.read_text()[-3000:])  # type: ignore[misc]
        yield found
    finally:
        for server in running:
            os.killpg(server.pid, signal.SIGTERM)
        for server in running:
            server.wait(60)


async def measure(part: str, where: Any, rounds: int) -> Json:
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        return await {"mixed": mixed, "exposed": exposed, "unused": unused}[part](Client(http), where, rounds)


def find_model(kind: str, directory: Path) -> Path:
    if kind == "tiny":
        subprocess.run([sys.executable, str(TESTS / "tools" / "tiny_models.py"), "qwen3", str(directory)], check=True)
        return directory
    from pdhub.config.settings import cache_dir
    from pdhub.operate.quickstart import model

    gguf, key = model.find_gguf()
    out = model.converted_path(cache_dir(), key)
    if not model.is_converted(out):
        model.convert(gguf, out, lambda percent: None)
    return Path(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--model", choices=["tiny", "smol"], default="tiny", help="tiny Qwen3 or SmolLM2")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    venv = os.environ.get("PDHUB_VLLM_VENV")
    if venv is None:
        print("PDHUB_VLLM_VENV is not set: no vLLM to measure (make test-vllm makes one)")
        return 0
    vllm, found = Path(venv).absolute() / "bin" / "vllm", {}
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = find_model(args.model, directory / "model")
        worlds: list[tuple[Any, list[str]]] = [
            (lambda: tree(args.model, model, vllm, directory), [p for p in args.part if p != "unused"]),
            (lambda: pair(model, vllm, directory), [p for p in args.part if p == "unused"]),
        ]
        for make, parts in worlds:
            if not parts:
                continue
            with make() as where:
                for part in parts:
                    head = {
                        "goal": GOALS[part],
                        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
                        "commit": commit.stdout.strip(),
                        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
                        "load_before": os.getloadavg()[0],
                        "rounds": args.rounds,
                    }
                    found[f"{part} {args.model}"] = head | asyncio.run(measure(part, where, args.rounds))
    text = json.dumps(found)
    if args.out is not None and args.out.exists():
        text = json.dumps(json.loads(args.out.read_text()) | found)
    text = json.dumps(json.loads(text, parse_float=lambda number: round(float(number), 3)), indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
