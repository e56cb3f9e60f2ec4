"""Cancels, a killed node and preemption: is everything right afterwards?"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from handover import prompt
from legs import Legs, gather
from tree import NODE, PREFILL, Tree, gauges, get, preemptions, wait_for


async def preempted(legs: Legs, tokens: int, count: int) -> dict[str, Any]:
    """Hand-overs while the prefill instance decodes more than its cache can hold, so that it preempts. Digests are
    checked by the node (`verify`): a wrong byte fails the request."""
    rng = random.Random(10)
    before = preemptions()
    busy = [asyncio.create_task(legs.direct(prompt(tokens, rng), 600)) for _ in range(8)]
    done = await gather([legs.handed(prompt(tokens, rng), 4) for _ in range(count)], 3)
    again = await asyncio.gather(*busy, return_exceptions=True)
    failed = [str(d)[:300] for d in (*done, *again) if isinstance(d, BaseException)]
    out: dict[str, Any] = {"prompt_tokens": tokens, "handed_over": count, "failed": len(failed)}
    out["preemptions"] = preemptions() - before
    return out | ({"first_failure": failed[0]} if failed else {})


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
