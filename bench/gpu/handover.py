"""What a hand-over costs: exposed time, bytes a second, prefill throughput, and what is left after faults."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from legs import Legs, Trace, gather
from tree import NODE, PREFILL, Tree, gauges, get, wait_for

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


async def warm(legs: Legs, lengths: Sequence[int], pull: bool, rng: random.Random) -> None:
    """Kernels, connections and memory of every size."""
    for tokens in lengths:
        for _ in range(2):
            await legs.handed(prompt(tokens, rng), 8)
            if pull:
                await legs.pulled(prompt(tokens, rng), 8)


async def exposed(legs: Legs, tokens: int, runs: int, pulls: int, rng: random.Random) -> dict[str, Any]:
    """From the complete prefill answer to the first token that decode computed, less one step of that engine.

    The node's first token is prefill's, so its first own is the second; vLLM's is its first. Both kinds alternate.
    """
    handed: list[Trace] = []
    pulled: list[Trace] = []
    for run in range(runs):
        handed.append(await legs.handed(prompt(tokens, rng), 8))
        if run < pulls:
            pulled.append(await legs.pulled(prompt(tokens, rng), 8))
    out: dict[str, Any] = {"prompt_tokens": tokens, "pdhub": _exposed(handed, 1)}
    out["pdhub"]["node_handoff"] = percentiles([trace.stats["handoff_ms"] / 1e3 for trace in handed])
    out["pdhub"]["kv_bytes"] = handed[0].stats["kv_bytes"]
    if pulls:
        out["nixl_pull"] = _exposed(pulled, 0)
        out["pdhub_to_pull_p50"] = round(
            out["pdhub"]["exposed"]["p50_ms"] / max(1e-3, out["nixl_pull"]["exposed"]["p50_ms"]), 4
        )
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


async def throughput(legs: Legs, tokens: int, count: int, at_once: int, rounds: int) -> dict[str, Any]:
    """Prompt tokens a second of the prefill instance: alone, and with every request handed over; in turns."""
    rng = random.Random(5)
    found: dict[str, list[float]] = {"alone": [], "handed": []}
    for _ in range(rounds):
        for kind in found:
            works = []
            for _ in range(count):
                asked = prompt(tokens, rng)
                works.append(legs.prefill(asked) if kind == "alone" else legs.handed(asked, 1))
            begin = time.perf_counter()
            done = await gather(works, at_once)
            elapsed = time.perf_counter() - begin
            if failed := [str(d) for d in done if isinstance(d, BaseException)]:
                raise RuntimeError(f"{len(failed)} of {count}: {failed[0]}")
            found[kind].append(count * tokens / elapsed)
    alone, handed = (sorted(found[kind])[rounds // 2] for kind in ("alone", "handed"))
    return {
        "prompt_tokens": tokens,
        "requests": count,
        "at_once": at_once,
        "rounds": rounds,
        "alone_tokens_s": [round(v) for v in found["alone"]],
        "handed_tokens_s": [round(v) for v in found["handed"]],
        "ratio_of_medians": round(handed / alone, 4),
    }


async def routed(legs: Legs, tokens: int, count: int, at_once: int, pools: Sequence[str]) -> dict[str, Any]:
    """TTFT and TPOT through the router."""
    rng = random.Random(6)
    out: dict[str, Any] = {"prompt_tokens": tokens, "at_once": at_once}
    for pool in pools:
        traces = await gather([legs.routed(prompt(tokens, rng), 16, pool) for _ in range(count)], at_once)
        good = [trace for trace in traces if not isinstance(trace, BaseException)]
        if not good:
            out[pool] = {"failed": len(traces), "first_failure": str(traces[0])[:300]}
            continue
        out[pool] = {
            "failed": len(traces) - len(good),
            "ttft": percentiles([trace.times[0] for trace in good]),
            "tpot": percentiles([(trace.times[-1] - trace.times[0]) / (len(trace.times) - 1) for trace in good]),
        }
    return out


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


async def storm(legs: Legs, tree: Tree, tokens: int, count: int, pull: bool) -> dict[str, Any]:
    """Cancels at random times, then SIGKILL of the node with hand-overs under way: is everything right afterwards?"""
    rng = random.Random(8)
    asked = prompt(tokens, rng)
    before = (await legs.handed(asked, 16)).tokens
    begin = time.perf_counter()
    await legs.handed(prompt(tokens, rng), 1)
    usual = time.perf_counter() - begin
    works = [_cancelled(legs, prompt(tokens, rng), rng.uniform(0, 1.2 * usual), i % 2 == 0) for i in range(count)]
    ended = await gather(works, 3)
    out: dict[str, Any] = {"prompt_tokens": tokens, "cancelled": count}
    out["ended_as"] = {name: sum(_name(e) == name for e in ended) for name in sorted({_name(e) for e in ended})}
    out["idle_after_cancels"] = _idle()
    out["equal_after_cancels"] = (await legs.handed(asked, 16)).tokens == before

    running = [asyncio.create_task(legs.handed(prompt(tokens, rng), 8)) for _ in range(3)]
    await asyncio.sleep(usual / 2)
    tree.kill_node()
    killed = await asyncio.gather(*running, return_exceptions=True)
    out["requests_of_the_killed_node_that_failed"] = sum(isinstance(k, BaseException) for k in killed)
    out["idle_after_kill"] = _idle()
    wait_for(lambda: get(NODE, "/health") is not None, 120, tree.tail)
    out["equal_after_kill"] = (await legs.handed(asked, 16)).tokens == before
    if pull:
        out["pull_after_kill"] = bool((await legs.pulled(asked, 4)).tokens)
    out["cuda_errors_in_log"] = tree.log.read_text(errors="replace").lower().count("cuda error")
    return out


async def _cancelled(legs: Legs, asked: list[int], after_s: float, client_leaves: bool) -> str:
    params = await legs.claim(asked, 4)
    work = asyncio.create_task(legs.prefill(asked, params))
    await asyncio.sleep(after_s)
    await legs.cancel(params["pdhub"]["transfer_id"])
    done = work.done()
    if client_leaves:
        work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return "after prefill" if done else "during prefill"


def _name(ended: Any) -> str:
    return type(ended).__name__ if isinstance(ended, BaseException) else str(ended)


def _idle() -> dict[str, Any]:
    begin = time.monotonic()
    try:
        wait_for(lambda: not any(gauges(PREFILL).values()), 45, lambda: "")
    except TimeoutError:
        return {"idle": False, **gauges(PREFILL)}
    return {"idle": True, "within_s": round(time.monotonic() - begin, 2)}
