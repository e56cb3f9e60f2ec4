"""What a hand-over costs one request: exposed time, bytes a second, speed of decode."""

from __future__ import annotations

import random
from collections.abc import Coroutine, Sequence
from typing import Any

from legs import Legs, Trace

VOCABULARY = 100_000


def prompt(tokens: int, rng: random.Random) -> list[int]:
    """Random ids: no two prompts share a prefix."""
    return [rng.randrange(1000, VOCABULARY) for _ in range(tokens)]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "p50_ms": round(1e3 * ordered[len(ordered) // 2], 3),
        "p90_ms": round(1e3 * ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], 3),
        "max_ms": round(1e3 * ordered[-1], 3),
    }


async def warm(legs: Legs, lengths: Sequence[int], peers: Sequence[str], rng: random.Random) -> None:
    """Kernels, connections and memory of every size."""
    for tokens in lengths:
        for _ in range(2):
            await legs.handed(prompt(tokens, rng), 8)
            for peer in peers:
                await _peer(legs, peer, prompt(tokens, rng), 8)


def _peer(legs: Legs, name: str, asked: list[int], count: int) -> Coroutine[Any, Any, Trace]:
    """One request through one of vLLM's own connectors, ``pull`` or ``push``."""
    return legs.pulled(asked, count) if name == "pull" else legs.pushed(asked, count)


async def exposed(
    legs: Legs, tokens: int, runs: int, peers: Sequence[str], peer_runs: int, rng: random.Random
) -> dict[str, Any]:
    """From the complete prefill answer to the first token that decode computed, less one step of that engine.

    The node's first token is prefill's, so its first own is the second; vLLM's is its first. All kinds alternate.
    """
    handed: list[Trace] = []
    theirs: dict[str, list[Trace]] = {peer: [] for peer in peers}
    for run in range(runs):
        handed.append(await legs.handed(prompt(tokens, rng), 8))
        if run < peer_runs:
            for peer, traces in theirs.items():
                traces.append(await _peer(legs, peer, prompt(tokens, rng), 8))
    out: dict[str, Any] = {"prompt_tokens": tokens, "pdhub": _exposed(handed, 1)}
    out["pdhub"]["node_handoff"] = percentiles([trace.stats["handoff_ms"] / 1e3 for trace in handed])
    out["pdhub"]["kv_bytes"] = handed[0].stats["kv_bytes"]
    for peer, traces in theirs.items():
        out[f"nixl_{peer}"] = found = _exposed(traces, 0)
        ours = out["pdhub"]["exposed"]["p50_ms"]
        out[f"pdhub_to_{peer}_p50"] = round(ours / max(1e-3, found["exposed"]["p50_ms"]), 4)
    return out


def _exposed(traces: Sequence[Trace], first: int) -> dict[str, Any]:
    step = sorted(trace.step(first) for trace in traces)[len(traces) // 2]
    return {
        "exposed": percentiles([trace.times[first] - trace.prefilled - step for trace in traces]),
        "until_first_own_token": percentiles([trace.times[first] - trace.prefilled for trace in traces]),
        "prefill": percentiles([trace.prefilled for trace in traces]),
        "step_ms": round(1e3 * step, 3),
    }


async def afterwards(legs: Legs, tokens: int, runs: int, rng: random.Random) -> dict[str, Any]:
    """Prompts that the prefill instance has in its cache: all KV leaves at once, after a short forward pass."""
    speeds, times = [], []
    for _ in range(runs):
        asked = prompt(tokens, rng)
        await legs.handed(asked, 2)
        trace = await legs.handed(asked, 2)
        times.append(trace.stats["handoff_ms"] / 1e3)
        speeds.append(trace.stats["kv_bytes"] / (trace.stats["handoff_ms"] / 1e3) / 1e9)
    return {
        "prompt_tokens": tokens,
        "decode_call_to_usable": percentiles(times),
        "gb_s_p50": round(sorted(speeds)[len(speeds) // 2], 1),
    }


async def decode_speed(legs: Legs, tokens: int, count: int, runs: int, pull: bool) -> dict[str, Any]:
    """One user: median gap between tokens as a client of the node and of vLLM sees it."""
    rng = random.Random(7)
    handed = [await legs.handed(prompt(tokens, rng), count) for _ in range(runs)]
    out: dict[str, Any] = {"prompt_tokens": tokens, "tokens": count, "runs": runs}
    out["transformers_ms"] = round(1e3 * sorted(t.step(4) for t in handed)[runs // 2], 3)
    if pull:
        pulled = [await legs.pulled(prompt(tokens, rng), count) for _ in range(runs)]
        out["vllm_ms"] = round(1e3 * sorted(t.step(4) for t in pulled)[runs // 2], 3)
        out["ratio"] = round(out["transformers_ms"] / out["vllm_ms"], 3)
    return out
