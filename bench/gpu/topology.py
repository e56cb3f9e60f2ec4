"""One endpoint over TileRT and native vLLM decode that share a prefill instance, on two GPUs.

::

    python3 bench/gpu/topology.py --site SITE --out FOLDER

GPU 0: vLLM with NixlConnector and TileRT's stock connector under MultiConnector, serving a narrow DeepSeek-V3.2 with
random weights. GPU 1: TileRT's stock decode server with its stub engine, and a vLLM that pulls KV over NIXL. In front
of them one router, policy ``slo``. Requests with a tight TPOT target must come from TileRT, all others from vLLM, in
one batch. Results go to FOLDER/topology.json as they come; FOLDER gets the servers' logs too. Status 1 if anything was
wrong.

``--hosted``: TileRT's stub engine in `pdhub node`, filled by pdhub's own connector over NIXL, in place of TileRT's
connector and decode server. Prefill computes prompts in chunks, and every byte is compared by digest.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import json
import os
import random
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import mixed
import shapes
from up import Up, fetch, fetch_json

ROUTER, PREFILL, TILERT, NATIVE = 8000, 8100, 5557, 8300
LOCAL = "http://127.0.0.1"
CONTEXT = 4096
KV = "6G"
"""Of each vLLM: five times its eight longest requests. Given in bytes, because two servers that measure the free memory
of one GPU at the same time disturb each other."""
CHUNK = 512
"""Tokens of a step of the vLLM servers beside a hosted node."""


def document(model: Path, gpus: tuple[int, int], python: str = sys.executable) -> dict[str, Any]:
    """What a user would write.

    Args:
        gpus: prefill's, and that of both kinds of decode.
    """
    args = [
        "--load-format", "dummy",
        "--dtype", "bfloat16",
        "--kv-cache-dtype", "fp8_ds_mla",
        "--kv-cache-memory-bytes", KV,
        "--gpu-memory-utilization", "0.1",  # only checked: the bytes above are what is taken
        "--max-num-batched-tokens", str(CONTEXT),
        "--enforce-eager",
        "--disable-uvicorn-access-log",
        "--kernel-config", '{"enable_flashinfer_autotune": false}',
    ]  # fmt: skip
    env = {
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled at the first start, for a minute and a half
    }
    # both ends of TileRT's NIXL transport must be told alike; without a network they find no address by themselves
    tilert = {"TILERT_PD_SHARDS": "1", "TILERT_PD_SENDERS": "1", "TILERT_PD_PROBE_ADDR": "127.0.0.1"}

    def vllm(gpu: int, *more: str, **variables: str) -> dict[str, Any]:
        serve = {
            "command": [python, "-m", "vllm.entrypoints.cli.main", "serve"],
            "args": [*args, *more],
            "env": {"CUDA_VISIBLE_DEVICES": str(gpu), **env, **variables},
            "ready_within_s": 480,
        }
        return {
            "type": "vllm",
            "config": {"handoff": "nixl", "slots": 8, "max_context": CONTEXT, "serve": serve},
        }

    decode = {
        "profile": "dsv32",
        "max_seq_len": CONTEXT,
        "mtp": False,
        "serve": {
            "python": python,
            "engine": "stub",
            "probe_address": "127.0.0.1",
            "env": {"CUDA_VISIBLE_DEVICES": str(gpus[1])},
            "ready_within_s": 480,
        },
    }
    return {
        "version": 1,
        "model": {"name": "m", "path": str(model)},
        "router": {
            "port": ROUTER,
            "debug_headers": True,
            "pair_check": False,  # a stub's tokens are nobody else's
            "first_byte_timeout_s": 120,
            "idle_timeout_s": 60,
        },
        "admission": {"default_budget_s": 300},  # all requests come at once, and TileRT takes one at a time
        "handoff": {"deadline_s": 60},
        "prefill": [
            {"name": "prefill-0", "port": PREFILL, "engine": vllm(gpus[0], "--max-num-seqs", "16", **tilert)},
        ],
        "pools": [
            {
                "name": "tilert",
                "cost": 8,
                "engine": {"type": "tilert", "config": decode},
                "nodes": [{"name": "tilert-0", "port": TILERT}],
                "latency": {"ttft_ms": 400, "tpot_ms": 3},
            },
            {
                "name": "vllm",
                "cost": 1,
                "engine": vllm(gpus[1]),
                "nodes": [{"name": "vllm-0", "port": NATIVE}],
                "latency": {"ttft_ms": 400, "tpot_ms": 40},
            },
        ],
        "policy": {"type": "slo"},
    }


def hosted(stock: dict[str, Any], python: Path) -> dict[str, Any]:
    """The same with TileRT's engine in `pdhub node`.

    Args:
        stock: what :func:`document` returns. python: an interpreter that sees decode's GPU only; it runs the node.
    """
    prefill, (pool, native) = stock["prefill"][0]["engine"]["config"], stock["pools"]
    for server in (prefill, native["engine"]["config"]):  # alike: answers of the two are compared
        args = server["serve"]["args"]
        args[args.index("--max-num-batched-tokens") + 1] = str(CHUNK)
    prefill["pdhub_port"] = 5580
    engine = {"profile": "dsv32", "max_seq_len": CONTEXT, "mtp": False, "engine": "stub", "python": str(python)}
    pool |= {"engine": {"type": "tilert-node", "config": engine}, "landings": 3}
    transport = {"type": "nixl", "config": {"devices": ["cpu", "cuda"], "device_warm_bytes": 4 << 30}}
    return {**stock, "handoff": {**stock["handoff"], "transport": transport, "verify": True}}


def seeing(gpu: int, python: str, path: Path) -> Path:
    """Write a command that runs ``python`` with one GPU."""
    path.write_text(f'#!/bin/sh\nCUDA_VISIBLE_DEVICES={gpu} exec {python} "$@"\n')
    path.chmod(0o755)
    return path


class Run:
    """What was found, in a file that is whole at any time.

    Args:
        within_s: when all has to be over; what there is no time for is left out and said.
    """

    def __init__(self, out: Path, within_s: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.path = out, out / "topology.json"
        self.deadline = time.monotonic() + within_s
        self.found: dict[str, Any] = {}
        self.begin = time.monotonic()

    def save(self, part: str, value: Any) -> None:
        self.found[part] = value
        self.found["took_s"] = round(time.monotonic() - self.begin, 1)
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")
        print(f"[{self.found['took_s']:.0f} s] {part}: {json.dumps(value)[:700]}", flush=True)

    def left(self) -> float:
        return self.deadline - time.monotonic()


def facts() -> dict[str, Any]:
    """Machine and versions."""
    import torch

    out: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    for name in ("vllm", "tilert", "nixl-cu13", "transformers", "triton", "pdhub", "pdhub-tilert", "pdhub-vllm"):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = None
    return out


async def warm(run: Run) -> dict[str, Any]:
    """Both vLLMs compile kernels at their first prompts: without a router in between, whose time would run out."""
    rng, times = random.Random(1), {}

    async def one(name: str, port: int) -> None:
        async with mixed.Client(f"{LOCAL}:{port}", max(30.0, run.left() - 120)) as client:
            for length in (8, 100, 700, 1500):
                prompt = [rng.randrange(10, 100_000) for _ in range(length)]
                begin = time.monotonic()
                ask = mixed.Ask("vllm", "/v1/completions", {"model": "m", "prompt": prompt}, {}, False, length)
                await client.alone(ask, "warm", 4)
                times[f"{name}_{length}_s"] = round(time.monotonic() - begin, 2)

    await asyncio.gather(one("prefill", PREFILL), one("decode", NATIVE))
    return times


def ended() -> dict[str, float]:
    """The router's own count of requests, by pool and outcome."""
    text = fetch(f"{LOCAL}:{ROUTER}/metrics") or ""
    rows = re.findall(r"^pdhub_router_requests_total\{([^}]*)\} (\S+)$", text, re.MULTILINE)
    return {_short(labels): float(value) for labels, value in rows}


def _short(labels: str) -> str:
    found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    return f"{found.get('pool')} {found.get('outcome')} {found.get('code')}".strip()


async def through_router(run: Run, part: str, wanted: list[mixed.Ask], at_once: int) -> bool:
    """Both kinds of requests in one batch, through the one endpoint. True if every answer is right."""
    before, begin = ended(), time.monotonic()
    async with mixed.Client(f"{LOCAL}:{ROUTER}", max(20.0, min(300.0, run.left()))) as client:
        await mixed.many(client, wanted, at_once)
    took, after = time.monotonic() - begin, ended()
    counted = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    shape = {"requests": len(wanted), "at_once": at_once, "took_s": round(took, 1), "counted_by_router": counted}
    run.save(part, {**shape, **mixed.summary(wanted)})
    return all(not ask.wrong() for ask in wanted)


def records(count: int) -> dict[str, Any]:
    """What the router's records of the last requests say, by pool."""
    told = (fetch_json(f"{LOCAL}:{ROUTER}/debug/requests") or {"requests": []})["requests"][:count]
    out = {}
    for pool in sorted({str(r["pool"]) for r in told}):
        mine = [r for r in told if str(r["pool"]) == pool]
        names = ("ttft_ms", "tpot_ms", "handoff_ms", "queued_ms", "total_ms")
        out[pool] = {n: mixed.spread([r[n] / 1e3 for r in mine if r[n] is not None]) for n in names}
        out[pool]["kv_bytes"] = sum(r["kv_bytes"] or 0 for r in mine)
        out[pool]["attempts"] = {str(n): [r["attempts"] for r in mine].count(n) for n in {r["attempts"] for r in mine}}
    return out


def logs(tree: Up) -> dict[str, Any]:
    """What TileRT's connector and decode server logged themselves."""
    text = tree.log.read_text(errors="replace")
    sent = re.findall(r"sent \w+: rank=0 seq=(\d+) gen=\d+ ([\d.]+) MB in ([\d.]+) ms", text)
    stats = re.findall(r"REQSTAT .*?wire_wait=([\d.]+) convert=([\d.]+)", text)
    return {
        "claimed": len(re.findall(r"claimed \S+ \(rid=", text)),
        "sent": len(sent),
        "sent_mb": round(sum(float(row[1]) for row in sent), 1),
        "sent_ms": mixed.spread([float(row[2]) / 1e3 for row in sent]),
        "decoded": len(stats),
        "wire_wait_ms": mixed.spread([float(row[0]) / 1e3 for row in stats]),
        "convert_ms": mixed.spread([float(row[1]) / 1e3 for row in stats]),
        "gave_up": len(re.findall(r"gave up admitting", text)),
        "cuda_errors": text.lower().count("cuda error"),
    }


def idle() -> dict[str, Any]:
    """Nothing is left at any server."""
    status = fetch_json(f"{LOCAL}:{TILERT}/decode_status") or fetch_json(f"{LOCAL}:{TILERT}/load")
    out: dict[str, Any] = {"tilert": status}
    for name, port in (("prefill", PREFILL), ("decode", NATIVE)):
        text = fetch(f"{LOCAL}:{port}/metrics") or ""
        for short in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            found = re.search(rf"^vllm:{short}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
            out[f"{name}_{short}"] = float(found[1]) if found else None
    return out


def doctor(tree: Up, run: Run) -> dict[str, Any]:
    """`pdhub doctor` on the running stack."""
    argv = [sys.executable, "-m", "pdhub", "doctor", str(tree.path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=max(10.0, min(90.0, run.left())))
    (run.out / "doctor.txt").write_text(done.stdout + done.stderr)
    return {"status": done.returncode, "errors": [line for line in done.stdout.splitlines() if "error" in line.lower()]}


def measure(run: Run, tree: Up, each: int, at_once: int) -> bool:
    """All parts. True if every answer was right."""
    run.save("warm", asyncio.run(warm(run)))
    asyncio.run(through_router(run, "first_through_the_router", mixed.asks(10, random.Random(2)), 2))
    wanted = mixed.asks(each, random.Random(3))
    good = asyncio.run(through_router(run, "batch", wanted, at_once))
    run.save("idle_at_once", idle())
    for name in ("decisions", "requests"):
        (run.out / f"{name}.json").write_text(fetch(f"{LOCAL}:{ROUTER}/debug/{name}") or "")
    run.save("records", records(len(wanted)))
    run.save("tilert_logs", logs(tree))
    if not good and run.left() > 120:  # once more: is it always so?
        good = asyncio.run(through_router(run, "batch_again", mixed.asks(each, random.Random(4)), at_once))

    async def compare() -> tuple[dict[str, Any], dict[str, Any]]:
        async with (
            mixed.Client(f"{LOCAL}:{NATIVE}", 60) as decode,
            mixed.Client(f"{LOCAL}:{PREFILL}", 60) as prefill,
        ):
            return await asyncio.gather(
                mixed.compared(decode, wanted, run.deadline - 25),
                mixed.first_tokens(prefill, wanted, run.deadline - 25),
            )

    native, first = asyncio.run(compare())
    run.save("native_against_its_own", native)
    run.save("first_tokens_against_prefill", first)
    run.save("idle_at_the_end", idle())
    if run.left() > 15:
        run.save("doctor", doctor(tree, run))
    return good and native["settled"] == native["settled_and_equal"] > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, required=True, help="where unpack.sh has put the bundle")
    parser.add_argument("--out", type=Path, required=True, help="for logs and topology.json")
    parser.add_argument("--hosted", action="store_true", help="TileRT's engine in `pdhub node`")
    parser.add_argument("--each", type=int, default=100, help="requests of each kind")
    parser.add_argument("--at-once", type=int, default=16, help="requests under way")
    parser.add_argument("--within", type=float, default=500, help="seconds for everything but stopping the servers")
    given = parser.parse_args()
    os.environ["PATH"] = f"{given.site / 'bin'}:{os.environ['PATH']}"  # where kernels are compiled at the first start
    run, good, ready = Run(given.out, given.within), False, dict[str, float]()
    try:
        run.save("facts", facts())
        wanted = document(shapes.narrow(given.site / "dsv32-narrow"), (0, 1))
        if given.hosted:
            wanted = hosted(wanted, seeing(1, sys.executable, given.out / "python-on-gpu-1"))
        with Up(wanted, given.out, "topology") as tree:
            try:
                tree.wait(run.deadline - 60, ready)
            finally:
                run.save("ready_after_s", ready)
            good = measure(run, tree, given.each, given.at_once)
    except BaseException as error:  # what was found is worth having, whatever stopped it
        traceback.print_exc()
        run.save("error", f"{type(error).__name__}: {error}"[-4000:])
        good = False
        if not isinstance(error, Exception):
            raise
    finally:
        run.save("right", good)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
