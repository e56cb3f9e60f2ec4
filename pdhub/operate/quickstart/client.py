"""One streamed OpenAI request, and what the router recorded about it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pdhub.api import PDHubError

_RECORD_WITHIN_S = 5.0
_POOLS_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask, and the latency targets in milliseconds (None: no target). ``pool``: for measuring that one."""

    prompt: str
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    max_tokens: int = 48
    pool: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def headers(self) -> dict[str, str]:
        named = {"x-slo-ttft-ms": self.ttft_ms, "x-slo-tpot-ms": self.tpot_ms}
        out = {name: f"{value:g}" for name, value in named.items() if value is not None}
        return out if self.pool is None else {**out, "x-quickstart-pool": self.pool}


@dataclass(frozen=True, slots=True)
class Answer:
    """The text, and the router's record of the request (see :class:`pdhub.api.RequestRecord`)."""

    text: str
    record: Mapping[str, Any]

    @property
    def tpot_ms(self) -> float | None:
        value = self.record.get("tpot_ms")
        return None if value is None else float(value)

    @property
    def ttft_ms(self) -> float | None:
        value = self.record.get("ttft_ms")
        return None if value is None else float(value)


class RequestFailed(PDHubError):
    """The endpoint answered with an error, or its stream ended early."""


class Endpoint:
    """The router, as a client sees it.

    Args:
        session: closed by the caller.
        url: without ``/v1``.
        model: id to ask for.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def all_pools_ready(self) -> None:
        """The router is ready as soon as it can serve anything; wait until it sees every pool.

        Raises RequestFailed with what is missing.
        """
        problems: list[str] = []
        deadline = asyncio.get_running_loop().time() + _POOLS_WITHIN_S
        while asyncio.get_running_loop().time() < deadline:
            async with self._session.get(f"{self._url}/ready") as answer:
                problems = (await answer.json())["problems"]
            if not problems:
                return
            await asyncio.sleep(0.05)
        raise RequestFailed("not every pool is ready: " + "; ".join(problems))

    async def ask(self, question: Question, on_first: Callable[[], None] | None = None) -> Answer:
        """Stream one answer. ``on_first`` is called at the first text. Raises RequestFailed."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": question.prompt}],
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "stream": True,
            **question.extra,
        }
        try:
            async with self._session.post(
                f"{self._url}/v1/chat/completions", json=body, headers=question.headers()
            ) as answer:
                if answer.status != 200:
                    raise RequestFailed(f"the endpoint answered {answer.status}: {(await answer.text())[:500]}")
                request_id = answer.headers["x-request-id"]
                text = await self._text(answer.content, on_first)
        except aiohttp.ClientError as error:
            raise RequestFailed(f"the endpoint broke off: {error!r}") from error
        return Answer(text, await self._record(request_id))

    async def _text(self, lines: aiohttp.StreamReader, on_first: Callable[[], None] | None) -> str:
        parts: list[str] = []
        async for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return "".join(parts)
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed(f"the stream ended with an error: {event['error'].get('message')}")
            for choice in event.get("choices", ()):
                piece = choice.get("delta", {}).get("content")
                if piece and not parts and on_first is not None:
                    on_first()
                if piece:
                    parts.append(piece)
        raise RequestFailed("the stream ended without [DONE]")

    async def _record(self, request_id: str) -> Mapping[str, Any]:
        """The record is written when the request has ended, a moment after its last byte."""
        deadline = asyncio.get_running_loop().time() + _RECORD_WITHIN_S
        while asyncio.get_running_loop().time() < deadline:
            async with self._session.get(f"{self._url}/debug/requests") as answer:
                answer.raise_for_status()
                for record in (await answer.json())["requests"]:
                    if record["id"] == request_id:
                        return dict(record)
            await asyncio.sleep(0.02)
        raise RequestFailed(f"the router has no record of request {request_id}")
