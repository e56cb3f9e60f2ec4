"""What hand-overs cost under load: prefill throughput, requests beside them, and the router at rising rates."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from handover import percentiles, prompt
from legs import Legs, gather


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
            "router": _parts(await legs.records(len(good))),
        }
    return out


def _parts(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Where the time to the first token went, as the router saw it."""
    parts: dict[str, list[float]] = {"before_prefill": [], "prefill": [], "after_prefill": []}
    for record in records:
        sent, answered, first = record["extra"]["prefill_sent_ms"], record["extra"]["prefilled_ms"], record["ttft_ms"]
        if None not in (sent, answered, first):
            for part, ms in zip(parts, (sent, answered - sent, first - answered), strict=True):
                parts[part].append(ms / 1e3)
    return {part: percentiles(times) for part, times in parts.items() if times}


async def rates(
    legs: Legs, tokens: int, count: int, rates_s: Sequence[float], seconds: float, pools: Sequence[str]
) -> list[dict[str, Any]]:
    """TTFT and TPOT through the router at rising rates; the same Poisson arrivals for each pool, in turns."""
    rows = []
    for rate in rates_s:
        for pool in pools:
            rng = random.Random(int(1000 * rate))
            begin, at, works = time.perf_counter(), 0.0, []
            while (at := at + rng.expovariate(rate)) < seconds:
                await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
                works.append(asyncio.create_task(legs.routed(prompt(tokens, rng), count, pool)))
            done = await asyncio.gather(*works, return_exceptions=True)
            good = [trace for trace in done if not isinstance(trace, BaseException)]
            row: dict[str, Any] = {"pool": pool, "requests_s": rate, "prompt_tokens": tokens, "tokens": count}
            row |= {"requests": len(done), "failed": len(done) - len(good)}
            if failures := [str(d)[:300] for d in done if isinstance(d, BaseException)]:
                row["first_failure"] = failures[0]
            if good:
                row["ttft"] = percentiles([t.times[0] for t in good])
                row["tpot"] = percentiles([(t.times[-1] - t.times[0]) / (len(t.times) - 1) for t in good])
            rows.append(row)
    return rows


async def beside(legs: Legs, tokens: int, rounds: int) -> dict[str, Any]:
    """Decode of requests that vLLM's NIXL pool serves, while the same prefill instance computes prompts that are handed
    over to the node, and while it computes the same number that are not; in turns."""
    rng = random.Random(9)
    found: dict[str, list[float]] = {"alone": [], "handed": []}
    for _ in range(rounds):
        for kind in found:
            native = [asyncio.create_task(legs.pulled(prompt(tokens, rng), 200)) for _ in range(4)]
            others: list[Any] = []
            while not all(task.done() for task in native):
                asked = prompt(tokens, rng)
                others.append(await (legs.prefill(asked) if kind == "alone" else legs.handed(asked, 1)))
            traces = await asyncio.gather(*native)
            found[kind] += [(t.times[-1] - t.times[0]) / (len(t.times) - 1) for t in traces]
    alone, handed = (sorted(found[kind])[len(found[kind]) // 2] for kind in ("alone", "handed"))
    return {
        "prompt_tokens": tokens,
        "rounds": rounds,
        "tpot_beside_prefill_alone": percentiles(found["alone"]),
        "tpot_beside_handed_over": percentiles(found["handed"]),
        "speed_ratio_of_medians": round(alone / handed, 4),
    }
