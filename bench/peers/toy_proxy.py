"""What vLLM's toy proxy for NixlConnector does, in a few lines: a peer to measure against. The wheel does not ship it.

Like that script it is FastAPI and httpx under uvicorn: prefill with ``max_tokens=1``, then decode with prefill's
``kv_transfer_params``, whose bytes are passed on as they come. It neither checks, retries, nor watches anything.

    python bench/peers/toy_proxy.py PORT PREFILL_URL DECODE_URL
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

NOTHING = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


def make_app(prefill_url: str, decode_url: str) -> FastAPI:
    app = FastAPI()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    prefill = httpx.AsyncClient(base_url=prefill_url, timeout=None, limits=limits, trust_env=False)
    decode = httpx.AsyncClient(base_url=decode_url, timeout=None, limits=limits, trust_env=False)

    @app.get("/healthcheck")
    async def healthcheck() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body: dict[str, Any] = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        first = {**body, "stream": False, "max_tokens": 1}
        first.pop("stream_options", None)
        first["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False, **NOTHING}
        answer = await prefill.post("/v1/completions", json=first, headers=headers)
        answer.raise_for_status()
        body["kv_transfer_params"] = answer.json()["kv_transfer_params"]

        async def chunks() -> AsyncIterator[bytes]:
            async with decode.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
                reply.raise_for_status()
                async for chunk in reply.aiter_bytes():
                    yield chunk

        return StreamingResponse(chunks(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    port, prefill_at, decode_at = sys.argv[1:]
    uvicorn.run(make_app(prefill_at, decode_at), host="127.0.0.1", port=int(port), log_level="warning")
