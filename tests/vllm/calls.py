"""HTTP of the tests: plain urllib, one connection a call, usable from threads."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def get(url: str, timeout_s: float = 10) -> tuple[int, str]:
    """GET; status 0 if nobody answers."""
    return _ask(urllib.request.Request(url), timeout_s)


def post(url: str, body: Any, headers: Mapping[str, str] | None = None, timeout_s: float = 300) -> tuple[int, str]:
    """POST JSON; status 0 if nobody answers."""
    return send(url, json.dumps(body).encode(), headers, timeout_s)


def send(url: str, data: bytes, headers: Mapping[str, str] | None = None, timeout_s: float = 300) -> tuple[int, str]:
    """POST bytes as JSON; status 0 if nobody answers."""
    return _ask(urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})}), timeout_s)


def _ask(request: urllib.request.Request, timeout_s: float) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of an SSE stream. It must end with ``[DONE]``."""
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    assert lines, f"no event in {text!r}"
    assert lines[-1] == "[DONE]", f"the stream does not end with [DONE]: {text[-500:]!r}"
    return [json.loads(line) for line in lines[:-1]]


def token_ids(
    url: str, prompt: Any, max_tokens: int, headers: Mapping[str, str] | None = None, **more: Any
) -> list[int]:
    """Greedy ids of exactly ``max_tokens`` tokens, from a server or through the router; ``stream=True`` too.

    ``prompt``: text or ids.
    """
    body = {
        "model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **more,
    }  # fmt: skip
    status, text = post(f"{url}/v1/completions", body, headers)
    assert status == 200, f"{status} {text}"
    if body.get("stream"):
        documents = events(text)
        assert not any("error" in document for document in documents), text[-1000:]
        return [i for d in documents for choice in d["choices"] for i in choice.get("token_ids") or []]
    return list(json.loads(text)["choices"][0]["token_ids"])


def tokenize(url: str, text: str) -> list[int]:
    """By a server."""
    status, answer = post(f"{url}/tokenize", {"model": "m", "prompt": text})
    assert status == 200, answer
    return list(json.loads(answer)["tokens"])


def at_once(count: int, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Results in order, ``count`` calls at a time."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(function, items))
