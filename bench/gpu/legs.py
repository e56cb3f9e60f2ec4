"""The two legs of one request as a router sends them, with the time of every answer."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tree import CHOOSE, NODE, PREFILL, PREFILL_PUSH, PULL, PUSH, PUSH_ID, ROUTER, SIDE_PUSH


@dataclass
class Trace:
    """Seconds since the request began; ``times[i]`` is when token ``i`` came.

    ``prefilled``: the prefill answer was complete. ``stats``: what the node told of the hand-over.
    """

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    prefilled: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)

    def step(self, first: int) -> float:
        """Median gap between tokens from number ``first`` on."""
        gaps = sorted(b - a for a, b in zip(self.times[first:], self.times[first + 1 :], strict=False))
        return gaps[len(gaps) // 2] if gaps else 0.0


def greedy(prompt: Sequence[int], count: int) -> dict[str, Any]:
    """Body of a streamed request for exactly so many tokens."""
    return {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


class Legs:
    """Requests straight to the servers, without a router. Use as ``async with``."""

    async def __aenter__(self) -> Legs:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120), read_bufsize=1 << 20)
        info = await self._json("GET", f"http://127.0.0.1:{NODE}/capabilities")
        told = await self._json("GET", "http://127.0.0.1:5580/prefill")
        self.fingerprint = told["fingerprint"]
        assert self.fingerprint in info["accepts"], "node and prefill do not agree about the KV layout"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def prefill(self, prompt: Sequence[int], params: dict[str, Any] | None = None) -> dict[str, Any]:
        """One token of a prefill instance."""
        body = {"model": "m", "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        if params is not None:
            body["kv_transfer_params"] = params
        answer: dict[str, Any] = await self._json("POST", f"http://127.0.0.1:{PREFILL}/v1/completions", body)
        return answer

    async def direct(self, prompt: Sequence[int], count: int) -> Trace:
        """A whole answer of the prefill instance itself."""
        trace, body = Trace(), greedy(prompt, count)
        await self._stream(f"http://127.0.0.1:{PREFILL}/v1/completions", body, {}, time.perf_counter(), trace)
        return trace

    async def claim(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        """A landing at the node, and what the sender is told of it."""
        body = {
            "transfer_id": uuid.uuid4().hex,
            "request_id": "bench",
            "tokens": len(prompt),
            "max_tokens": count,
            "fingerprint": self.fingerprint,
        }
        reply = await self._json("POST", f"http://127.0.0.1:{NODE}/claim", body)
        names = ("transfer_id", "generation", "host", "port", "fingerprint")
        return {"pdhub": {name: reply[name] for name in names}}

    async def handed(self, prompt: Sequence[int], count: int) -> Trace:
        """Through pdhub's hand-over."""
        trace = Trace()
        params = await self.claim(prompt, count)
        begin = time.perf_counter()
        answer = await self.prefill(prompt, params)
        trace.prefilled = time.perf_counter() - begin
        if error := (answer.get("kv_transfer_params") or {}).get("pdhub", {}).get("error"):
            raise RuntimeError(f"the hand-over failed: {error}")
        mine = params["pdhub"]
        body = {
            "transfer_id": mine["transfer_id"],
            "generation": mine["generation"],
            "request_id": "bench",
            "prompt_token_ids": list(prompt),
            "first_token": answer["choices"][0]["token_ids"][0],
            "max_tokens": count,
            "sampling": {"temperature": 0.0},
            "ignore_eos": True,
        }
        async with self._http.post(f"http://127.0.0.1:{NODE}/decode", json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"decode: {reply.status} {await reply.text()}")
            async for line in reply.content:
                frame = json.loads(line)
                if "error" in frame:
                    raise RuntimeError(f"decode: {frame['error']}")
                trace.stats = frame.get("s", trace.stats)
                for token in frame.get("t", ()):
                    trace.tokens.append(token)
                    trace.times.append(time.perf_counter() - begin)
        return trace

    async def cancel(self, transfer_id: str) -> None:
        """End a transfer at the node."""
        body = {"transfer_id": transfer_id, "reason": "bench"}
        await self._json("POST", f"http://127.0.0.1:{NODE}/cancel", body)

    async def pulled(self, prompt: Sequence[int], count: int) -> Trace:
        """Through vLLM's NixlConnector: the decode instance fetches the blocks. Tokens are only counted: their ids come
        with those of the whole prompt, which would take part of the measured time."""
        trace = Trace()
        begin = time.perf_counter()
        answer = await self.prefill(prompt, {"do_remote_decode": True, "do_remote_prefill": False})
        trace.prefilled = time.perf_counter() - begin
        body = {**greedy(prompt, count), "kv_transfer_params": answer["kv_transfer_params"]}
        await self._stream(f"http://127.0.0.1:{PULL}/v1/completions", body, {}, begin, trace)
        return trace

    async def pushed(self, prompt: Sequence[int], count: int) -> Trace:
        """Through vLLM's NixlPushConnector: both legs at once, the prefill instance writes."""
        trace = Trace()
        name = uuid.uuid4().hex
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": PUSH_ID,
            "remote_host": "127.0.0.1",
            "remote_port": SIDE_PUSH,
            "tp_size": 1,
            "pp_size": 1,
            "remote_request_id": name,
            "transfer_id": name,
        }
        body = {**greedy(prompt, count), "kv_transfer_params": params}
        begin = time.perf_counter()

        async def prefill() -> None:
            await self._json(
                "POST",
                f"http://127.0.0.1:{PREFILL_PUSH}/v1/completions",
                {
                    "model": "m",
                    "prompt": list(prompt),
                    "max_tokens": 1,
                    "temperature": 0,
                    "return_token_ids": True,
                    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name},
                },
                {"x-request-id": name},
            )
            trace.prefilled = time.perf_counter() - begin

        stream = self._stream(f"http://127.0.0.1:{PUSH}/v1/completions", body, {"x-request-id": name}, begin, trace)
        await asyncio.gather(prefill(), stream)
        return trace

    async def routed(self, prompt: Sequence[int], count: int, pool: str) -> Trace:
        """Through the router."""
        trace = Trace()
        body = {**greedy(prompt, count), "return_token_ids": True}
        await self._stream(
            f"http://127.0.0.1:{ROUTER}/v1/completions", body, {CHOOSE: pool}, time.perf_counter(), trace
        )
        return trace

    async def records(self, count: int) -> list[dict[str, Any]]:
        """The router's, of the last requests that ended."""
        told = await self._json("GET", f"http://127.0.0.1:{ROUTER}/debug/requests")
        records: list[dict[str, Any]] = told["requests"][:count]
        return records

    async def _stream(
        self, url: str, body: dict[str, Any], headers: dict[str, str], begin: float, trace: Trace
    ) -> None:
        async with self._http.post(url, json=body, headers=headers) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{url}: {reply.status} {await reply.text()}")
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"{url}: {event['error']}")
                choice = (event["choices"] or [{}])[0]
                for token in choice.get("token_ids") or ([-1] if choice and "return_token_ids" not in body else ()):
                    trace.tokens.append(token)
                    trace.times.append(time.perf_counter() - begin)

    async def _json(self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        async with self._http.request(method, url, json=body, headers=headers) as reply:
            text = await reply.text()
            if reply.status != 200:
                raise RuntimeError(f"{url}: {reply.status} {text[:500]}")
            return json.loads(text)


async def gather(works: Sequence[Any], at_once: int) -> list[Any]:
    """Run coroutines, so many at once; exceptions are results."""
    gate = asyncio.Semaphore(at_once)

    async def one(work: Any) -> Any:
        async with gate:
            return await work

    return await asyncio.gather(*(one(work) for work in works), return_exceptions=True)
