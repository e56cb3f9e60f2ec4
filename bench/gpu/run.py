"""Runs parts of the GPU measurements on this machine and merges what they found into one JSON file.

::

    python3 bench/gpu/run.py --site SITE --out FOLDER PART…

Parts: ``facts``, ``wire``, ``equal-nixl``, ``equal-shm``, ``equal-tcp``, ``llama-1.24b``, ``qwen3-8.19b``, ``digests``,
``hard``, ``compiled-llama-1.24b``, ``compiled-qwen3-8.19b``.
A part that fails leaves its error in the file, and the next one runs. FOLDER gets the servers' logs.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import json
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import handover
import harm
import loads
import shapes
from equality import equality
from legs import Legs
from tree import Kind, Tree

ROOT = Path(__file__).parents[2]
NIXL = {"type": "nixl", "config": {"devices": ["cpu", "cuda"], "device_warm_bytes": 16 << 30}}


class Run:
    """Where things are, and what was found."""

    def __init__(self, site: Path, out: Path, quick: bool) -> None:
        import torch

        self.site, self.out, self.quick = site, out, quick
        self.gpus = (0, 1 if torch.cuda.device_count() > 1 else 0)
        self.peers = ("pull", "push") if self.gpus[1] else ("pull",)
        self.path = out / "handoff-gpu.json"
        self.found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.is_file() else {}

    def save(self, part: str, value: Any) -> None:
        self.found[part] = value
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")

    def real(self) -> Path:
        return shapes.real(self.site / "model.gguf", self.site / "smollm2")

    def shape(self, name: str) -> Path:
        return shapes.shape(name, self.site / name)


def facts(run: Run) -> dict[str, Any]:
    """Machine, versions, and the copies that everything else is compared with."""
    import torch

    out: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "prefill_and_decode_gpu": list(run.gpus),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    for name in ("vllm", "nixl-cu13", "transformers", "triton"):
        out[name] = importlib.metadata.version(name)
    for name, (a, b) in {"copy_same_gpu_gb_s": (0, 0), "copy_gpu_to_gpu_gb_s": run.gpus}.items():
        source = torch.ones(1 << 30, dtype=torch.uint8, device=f"cuda:{a}")
        target = torch.zeros(1 << 30, dtype=torch.uint8, device=f"cuda:{b}")
        times = [_timed(partial(target.copy_, source)) for _ in range(20)]
        out[name] = round((1 << 30) / 1e9 / statistics.median(times), 1)
    return out


def _timed(work: Callable[[], Any]) -> float:
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def wire(run: Run) -> list[Any]:
    """The transport alone, from device to device, as `pdhub handoff-bench` measures it."""
    rows = []
    for layout, tokens in (("llama-3.2-1b", 16000), ("qwen3-8b", 16000), ("qwen3-8b", 1024)):
        argv = [
            sys.executable, "-m", "pdhub", "handoff-bench", "-t", "nixl", "--layout", layout, "--tokens", str(tokens),
            "--chunk", "512", "--prefill", "30000", "--source", f"cuda:{run.gpus[0]}",
            "--target", f"cuda:{run.gpus[1]}", "--option", "devices=[cpu,cuda]", "--option",
            f"device_warm_bytes={16 << 30}", "--runs", "9", "--json",
        ]  # fmt: skip
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        rows += json.loads(done.stdout)["results"]
    return rows


def equal(transport: dict[str, Any], pools: tuple[str, ...], *, verify: bool) -> Callable[[Run], Any]:
    """A small real model in float32, through each pool of a tree."""

    def part(run: Run) -> Any:
        model = run.real()
        kind = Kind(
            model=model, dtype="float32", random=False, pools=pools, transport=transport, gpus=run.gpus,
            context=2048, step=512, verify=verify, args=("--attention-backend", "TRITON_ATTN", "--block-size", "16"),
        )  # fmt: skip
        with Tree(kind, run.out, f"equal-{transport['type']}") as tree:
            text = (ROOT / "ARCHITECTURE.md").read_text() + (ROOT / "docs" / "config.md").read_text()
            found = asyncio.run(equality(model, text, tuple(p for p in pools if p != "whole")))
            return {"transport": transport["type"], "digests": verify, "start_s": tree.started_s, **found}

    return part


def shape(name: str) -> Callable[[Run], Any]:
    """All measurements at one shape."""

    def part(run: Run) -> Any:
        large = name.startswith("qwen")
        kind = Kind(
            model=run.shape(name), dtype="bfloat16", random=True, pools=("nodes", *run.peers), transport=NIXL,
            gpus=run.gpus, context=33_000, step=2048, prefill_kv="20G" if large else "8G",
            decode_kv="12G" if large else "4G", landings=4,
        )  # fmt: skip
        with Tree(kind, run.out, name) as tree:
            return asyncio.run(_measured(run, tree, name))

    return part


async def _measured(run: Run, tree: Tree, name: str) -> dict[str, Any]:
    out: dict[str, Any] = {"start_s": tree.started_s}
    few, large = (3 if run.quick else 30), name.startswith("qwen")
    pools = ("nodes", *run.peers)

    async def step(key: str, work: Any) -> None:
        begin = time.monotonic()
        try:
            out[key] = await work
        except Exception as error:  # noqa: BLE001 - the other measurements are still worth having
            out[key] = {"error": f"{type(error).__name__}: {error}"[:1500]}
            traceback.print_exc()
        print(f"{name} {key} {time.monotonic() - begin:.1f} s: {json.dumps(out[key])[:600]}", flush=True)
        run.save(name, out)

    async with Legs() as legs:
        rng = random.Random(1)
        await step("warm", handover.warm(legs, (128, 1000, 4000, 16000, 32000), run.peers, rng))
        # on one GPU a pull takes seconds at long prompts: fewer of them
        shared = not run.gpus[1]
        for tokens, theirs in ((16000, 10), (1000, few), (4000, few), (32000, 5)):
            peer_runs = min(few, theirs) if shared else few
            await step(f"exposed_{tokens}", handover.exposed(legs, tokens, few, run.peers, peer_runs, rng))
        await step("cached_16000", handover.afterwards(legs, 16000, 3 if run.quick else 9, rng))
        await step(
            "throughput",
            loads.throughput(legs, 4000, 8 if run.quick else 30, 3, 1 if run.quick else 3 if large else 5),
        )
        await step("beside", loads.beside(legs, 4000, 1 if run.quick else 3))
        await step("router_16000", loads.routed(legs, 16000, 3 if run.quick else 12, 1, pools))
        await step("router_16000_c8", loads.routed(legs, 16000, 8 if run.quick else 32, 8, pools))
        if not shared:
            wanted = (1, 2, 4, 6) if large else (4, 8, 12, 16)
            await step("rates", loads.rates(legs, 4000, 64, wanted, 4 if run.quick else 12, ("pull", "push")))
        await step("decode_128", handover.decode_speed(legs, 128, 64, 3, True))
        await step("decode_4096", handover.decode_speed(legs, 4096, 64, 3, True))
        await step("faults", harm.storm(legs, tree, 8000, 8 if run.quick else 40, True))
    return out


def compiled(name: str) -> Callable[[Run], Any]:
    """One user's decode, with a step that torch has compiled."""

    def part(run: Run) -> Any:
        kind = Kind(
            model=run.shape(name), dtype="bfloat16", random=True, pools=("nodes", "pull"), transport=NIXL,
            gpus=run.gpus, context=8192, prefill_kv="8G", decode_kv="8G", engine={"graphs": "compiled"},
        )  # fmt: skip

        async def measure() -> list[Any]:
            async with Legs() as legs:
                await handover.warm(legs, (128, 4096), ("pull",), random.Random(3))
                return [await handover.decode_speed(legs, tokens, 128, 5, True) for tokens in (128, 4096)]

        with Tree(kind, run.out, f"compiled-{name}") as tree:
            return {"start_s": tree.started_s, "speeds": asyncio.run(measure())}

    return part


def digests(run: Run) -> Any:
    """KV of the 8.19B shape arrives as it was staged: sender and node digest every byte."""
    kind = Kind(
        model=run.shape("qwen3-8.19b"), dtype="bfloat16", random=True, pools=("nodes",), transport=NIXL,
        gpus=run.gpus, context=9000, step=2048, prefill_kv="12G", verify=True,
    )  # fmt: skip

    async def compare() -> list[Any]:
        rows = []
        async with Legs() as legs:
            rng = random.Random(2)
            for tokens in (1, 17, 1000, 2049, 4096, 8000):
                trace = await legs.handed(handover.prompt(tokens, rng), 2)  # fails if the digests differ
                rows.append({"prompt_tokens": tokens, "kv_bytes": trace.stats["kv_bytes"], "equal": True})
        return rows

    with Tree(kind, run.out, "digests"):
        return asyncio.run(compare())


def hard(run: Run) -> Any:
    """What is hard for a producer, with digests of every byte: two tensor-parallel ranks where there are two GPUs, the
    second model runner, CUDA graphs, hits in the prefix cache, several hand-overs at once, preemption."""
    ranks = tuple(dict.fromkeys(run.gpus))
    kind = Kind(
        model=run.shape("llama-1.24b"), dtype="bfloat16", random=True, pools=("nodes",), transport=NIXL,
        gpus=run.gpus, context=9000, step=2048, prefill_kv="384M", verify=True, eager=False, prefill_gpus=ranks,
        prefill_env={"VLLM_USE_V2_MODEL_RUNNER": "1"},
    )  # fmt: skip

    async def work() -> dict[str, Any]:
        out: dict[str, Any] = {"tensor_parallel": len(ranks)}
        async with Legs() as legs:
            rng = random.Random(11)
            rows = out["one_by_one"] = []
            for tokens in (1, 17, 1000, 2049, 4096, 8000):
                asked = handover.prompt(tokens, rng)
                first, again = await legs.handed(asked, 4), await legs.handed(asked, 4)
                rows.append({"prompt_tokens": tokens, "kv_bytes": first.stats["kv_bytes"], "digests_equal": True})
                rows[-1]["same_tokens_with_prefix_hits"] = first.tokens == again.tokens
            out["preempted"] = await harm.preempted(legs, 4000, 24)
        return out

    with Tree(kind, run.out, "hard") as tree:
        return {"start_s": tree.started_s, **asyncio.run(work())}


PARTS: dict[str, Callable[[Run], Any]] = {
    "facts": facts,
    "wire": wire,
    "equal-nixl": equal(NIXL, ("nodes", "pull", "whole"), verify=False),
    "equal-shm": equal({"type": "shm"}, ("nodes", "whole"), verify=True),
    "equal-tcp": equal({"type": "tcp"}, ("nodes", "whole"), verify=True),
    "llama-1.24b": shape("llama-1.24b"),
    "qwen3-8.19b": shape("qwen3-8.19b"),
    "digests": digests,
    "hard": hard,
    "compiled-llama-1.24b": compiled("llama-1.24b"),
    "compiled-qwen3-8.19b": compiled("qwen3-8.19b"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, required=True, help="where unpack.sh has put the bundle")
    parser.add_argument("--out", type=Path, required=True, help="for logs and handoff-gpu.json")
    parser.add_argument("--quick", action="store_true", help="few runs: does everything work?")
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    run = Run(given.site, given.out, given.quick)
    failed = 0
    for part in given.parts:
        begin = time.monotonic()
        try:
            run.save(part, PARTS[part](run))
        except Exception as error:  # noqa: BLE001 - as above
            traceback.print_exc()
            failed += 1
            run.save(part, {**run.found.get(part, {}), "error": f"{type(error).__name__}: {error}"[-3000:]})
        print(f"{part} took {time.monotonic() - begin:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
