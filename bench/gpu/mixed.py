"""Requests to one endpoint over two kinds of decode: did each come back from the right one, with the right tokens?"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from shapes import SPECIAL

LENGTHS = (8, 63, 64, 65, 100, 200, 400, 700, 1000, 1500)
COUNT = 8
"""Tokens that a native answer has."""

STUB = [11, 22, 33]
"""What TileRT's stub engine answers after the first token, which is prefill's."""

TIGHT = {"x-slo-tpot-ms": "10"}
LOOSE = ({}, {"x-slo-tpot-ms": "1000"})


@dataclass
class Ask:
    """One request, and what came of it.

    Args:
        pool: that ought to serve it. body: without `stream`. times: seconds since it began, one an event with tokens.
    """

    pool: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    stream: bool
    length: int
    status: int = 0
    told: dict[str, str] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    total_s: float = 0.0
    error: str = ""

    def wrong(self) -> str:
        """What is wrong with the answer, apart from the values of tokens that a model computes; empty = nothing."""
        if self.error or self.status != 200:
            return f"{self.status} {self.error}"
        if self.told.get("x-pdhub-pool") != self.pool:
            return f"served by {self.told.get('x-pdhub-pool')}"
        count, finish = (1 + len(STUB), "stop") if self.pool == "tilert" else (COUNT, "length")
        if len(self.tokens) != count or self.finish != finish:
            return f"{len(self.tokens)} tokens {self.tokens}, ended by {self.finish}"
        if self.pool == "tilert" and self.tokens[1:] != STUB:
            return f"tokens {self.tokens}"
        shown = [f"t{token}" for token in self.tokens if token >= len(SPECIAL)]
        if self.text.split() != shown:
            return f"text {self.text!r} of tokens {self.tokens}"
        if not self.stream and self.usage.get("completion_tokens") != count:
            return f"usage {self.usage}"
        return ""


def asks(each: int, rng: random.Random) -> list[Ask]:
    """As many of one pool as of the other, mixed: both endpoints, streamed and not, prompts of all lengths."""
    out = []
    for pool in ("tilert", "vllm"):
        for n in range(each):
            prompt = [rng.randrange(len(SPECIAL), 100_000) for _ in range(LENGTHS[n % len(LENGTHS)])]
            chat, stream = (n // len(LENGTHS)) % 4 == 1, n % 2 == 0
            body: dict[str, Any] = {"model": "m", "temperature": 0, "return_token_ids": True}
            if chat:
                body["messages"] = [{"role": "user", "content": " ".join(f"t{i}" for i in prompt)}]
            else:
                body["prompt"] = prompt
            # the stub ends by itself after four tokens; random weights do not, at least not when it is wanted
            body |= {"max_tokens": 16} if pool == "tilert" else {"max_tokens": COUNT, "ignore_eos": True}
            headers = TIGHT if pool == "tilert" else LOOSE[n % 3 % 2]
            path = "/v1/chat/completions" if chat else "/v1/completions"
            out.append(Ask(pool, path, body, headers, stream, len(prompt)))
    rng.shuffle(out)
    return out


class Client:
    """Requests to one server. Use as ``async with``."""

    def __init__(self, url: str, timeout_s: float = 120) -> None:
        self._url, self._timeout_s = url, timeout_s

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._http = aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(self, ask: Ask) -> None:
        """Fill in what came. Whatever goes wrong is in ``error``."""
        begin = time.perf_counter()
        body = {**ask.body, "stream": True} if ask.stream else ask.body
        try:
            async with self._http.post(self._url + ask.path, json=body, headers=ask.headers) as reply:
                ask.status = reply.status
                ask.told = {name.lower(): value for name, value in reply.headers.items() if name[:2].lower() == "x-"}
                if reply.status != 200:
                    ask.error = (await reply.text())[:500]
                elif not ask.stream:
                    document = await reply.json()
                    ask.usage = document.get("usage") or {}
                    _take(ask, document)
                else:
                    async for line in reply.content:
                        if line.startswith(b"data: {") and _take(ask, json.loads(line[6:])):
                            ask.times.append(time.perf_counter() - begin)
        except Exception as error:  # noqa: BLE001 - a failed request is a result
            ask.error = f"{type(error).__name__}: {error}"
        ask.total_s = time.perf_counter() - begin

    async def alone(self, ask: Ask, salt: str, max_tokens: int) -> list[int]:
        """The same prompt to a server that both prefills and decodes it; no cached prefix of another salt counts.

        Raises RuntimeError with what the server said.
        """
        body = {**ask.body, "max_tokens": max_tokens, "cache_salt": salt}
        mine = Ask(ask.pool, ask.path, body, {}, False, ask.length)
        await self.ask(mine)
        if mine.error:
            raise RuntimeError(mine.error)
        return mine.tokens


def _take(ask: Ask, document: dict[str, Any]) -> bool:
    """Take in one event, or the whole answer. True if it had tokens."""
    if "error" in document:
        ask.error = json.dumps(document["error"])[:500]
        return False
    found = False
    for choice in document.get("choices") or ():
        piece = choice.get("message") or choice.get("delta") or {}
        ask.text += choice.get("text") or piece.get("content") or ""
        ids = choice.get("token_ids") or []
        ask.tokens += ids
        ask.finish = choice.get("finish_reason") or ask.finish
        found = found or bool(ids)
    return found


async def many(client: Client, wanted: Sequence[Ask], at_once: int) -> None:
    """Send them in order, so many at once."""
    waiting = iter(wanted)

    async def worker() -> None:
        for ask in waiting:
            await client.ask(ask)

    await asyncio.gather(*(worker() for _ in range(at_once)))


def summary(wanted: Sequence[Ask]) -> dict[str, Any]:
    """Counts and latencies of each pool."""
    out: dict[str, Any] = {}
    for pool in sorted({ask.pool for ask in wanted}):
        mine = [ask for ask in wanted if ask.pool == pool]
        good = [ask for ask in mine if not ask.wrong()]
        bad = [{"length": ask.length, "path": ask.path, "what": ask.wrong()[:400]} for ask in mine if ask.wrong()]
        firsts = [ask.times[0] for ask in good if ask.times]
        gaps = [(ask.times[-1] - ask.times[0]) / (len(ask.tokens) - 1) for ask in good if len(ask.times) > 1]
        out[pool] = {
            "sent": len(mine),
            "right": len(good),
            "failures": bad[:10],
            "ttft_ms": spread(firsts),
            "tpot_ms": spread(gaps),
            "total_ms": spread([ask.total_s for ask in good]),
            "reasons": {r: [a.told.get("x-pdhub-reason") for a in mine].count(r) for r in _reasons(mine)},
        }
    return out


def _reasons(wanted: Sequence[Ask]) -> list[str]:
    return sorted({ask.told["x-pdhub-reason"] for ask in wanted if "x-pdhub-reason" in ask.told})


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median and ninth tenth, in milliseconds."""
    if not seconds:
        return None
    tenths = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 9
    return {"n": len(seconds), "p50": round(tenths[4] * 1e3, 2), "p90": round(tenths[8] * 1e3, 2)}


async def compared(client: Client, wanted: Sequence[Ask], deadline: float) -> dict[str, Any]:
    """Native answers against the decode instance's own: each prompt alone, alone again, then among eight at once.

    A prompt is settled if those three agree. An answer that differs from a settled prompt's is wrong.

    Args:
        deadline: on the monotonic clock; prompts whose turn comes later are left out.
    """
    mine = [ask for ask in wanted if ask.pool == "vllm" and not ask.wrong()]
    rows: list[tuple[Ask, list[list[int]]]] = []
    for begin in range(0, len(mine), 8):
        if time.monotonic() > deadline:
            break
        part = mine[begin : begin + 8]
        one = [await client.alone(ask, f"one-{begin + i}", COUNT) for i, ask in enumerate(part)]
        two = [await client.alone(ask, f"two-{begin + i}", COUNT) for i, ask in enumerate(part)]
        eight = await asyncio.gather(*(client.alone(a, f"eight-{begin + i}", COUNT) for i, a in enumerate(part)))
        rows += zip(part, map(list, zip(one, two, eight, strict=True)), strict=True)
    settled = [(ask, told) for ask, told in rows if all(tokens == told[0] for tokens in told)]
    return {
        "compared": len(rows),
        "different_answers": len({tuple(ask.tokens) for ask, _ in rows}),
        "equal_to_alone": sum(ask.tokens == told[0] for ask, told in rows),
        "settled": len(settled),
        "settled_and_equal": sum(ask.tokens == told[0] for ask, told in settled),
        "not_alike": [
            {"length": ask.length, "answer": ask.tokens, "own": told}
            for ask, told in rows
            if any(tokens != ask.tokens for tokens in told)
        ][:10],
    }


async def first_tokens(client: Client, wanted: Sequence[Ask], deadline: float) -> dict[str, Any]:
    """First tokens of TileRT's answers against what the prefill instance answers to the same prompts, one at a time."""
    mine = [ask for ask in wanted if ask.pool == "tilert" and not ask.wrong()]
    told = []
    for at, ask in enumerate(mine):
        if time.monotonic() > deadline:
            break
        told.append((ask, await client.alone(ask, f"first-{at}", 1)))
    return {
        "compared": len(told),
        "equal": sum(ask.tokens[:1] == tokens for ask, tokens in told),
        "unequal": [{"length": a.length, "answer": a.tokens[0], "own": t} for a, t in told if a.tokens[:1] != t][:10],
    }
