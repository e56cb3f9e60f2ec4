"""One request of a trial: it ends with the right answer, or with an error, and never with a wrong token."""

from __future__ import annotations

import asyncio
import json
import random
import string

import aiohttp
import safety_kv as kv


class Asked:
    """Sent when it is made.

    Attributes:
        outcome: ``right``, ``left``, ``broken`` (the router went away) or an error's code; ``wrong: …`` must never be.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, rng: random.Random, pause_s: float = 0.0) -> None:
        self._prompt = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 80)))
        self._tokens = rng.randint(1, 6)
        self._stream = rng.random() < 0.5
        self._want = kv.answer(self._prompt, self._tokens)
        self._left = False
        self.outcome = ""
        self._task = asyncio.create_task(self._run(http, url, pause_s))

    def leave(self) -> None:
        """Close the connection."""
        if not self._task.done():
            self._left = True
            self._task.cancel()

    async def ended(self, within_s: float) -> str:
        """The outcome."""
        done, _ = await asyncio.wait({self._task}, timeout=within_s)
        if not done:
            self.leave()
            return f"wrong: no end within {within_s:g} s"
        return self.outcome

    async def _run(self, http: aiohttp.ClientSession, url: str, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        body = {
            "model": "safety", "prompt": self._prompt, "max_tokens": self._tokens, "temperature": 0,
            "ignore_eos": True, "stream": self._stream,
        }  # fmt: skip
        data = b""
        try:
            async with http.post(f"{url}/v1/completions", json=body) as reply:
                async for piece in reply.content.iter_any():
                    data += piece
            self.outcome = self._judge(reply.status, data, whole=True)
        except TimeoutError:
            self.outcome = "wrong: no end"
        except aiohttp.ClientError:
            self.outcome = self._judge(200, data, whole=False) if self._stream else "broken"
        except asyncio.CancelledError:
            self.outcome = self._judge(200, data, whole=False) if self._stream else "left"

    def _judge(self, status: int, data: bytes, *, whole: bool) -> str:
        if status != 200:
            return str(json.loads(data)["error"]["code"])
        if not self._stream:
            return self._compare(json.loads(data)["choices"][0]["text"], ends=True)
        lines = data.decode(errors="replace").split("\n")[: None if whole else -1]
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
        codes = [event["error"]["code"] for event in events if "error" in event]
        ends = any(line == "data: [DONE]" for line in lines)
        found = self._compare(text, ends=ends and not codes)
        if found.startswith("wrong") or (ends and not codes):
            return found
        if codes:
            return f"wrong: [DONE] after {codes[0]}" if ends else str(codes[0])
        return ("left" if self._left else "broken") if not whole else f"wrong: a stream without an end: {data[-200:]!r}"

    def _compare(self, text: str, *, ends: bool) -> str:
        right = text == self._want if ends else self._want.startswith(text)
        return "right" if right else f"wrong: {text!r}, expected {self._want!r}"
