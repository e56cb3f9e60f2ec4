"""Is it ready, and what does it say about that? One GET."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

import aiohttp


class HttpProbe:
    """Asks URLs of this tree; an async context manager. Proxies from the environment are not used."""

    def __init__(self, timeout_s: float = 2.0) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpProbe:
        self._session = aiohttp.ClientSession(timeout=self._timeout, trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def __call__(self, url: str) -> bool:
        assert self._session is not None
        try:
            async with self._session.get(url, allow_redirects=False) as answer:
                return answer.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    async def document(self, url: str) -> dict[str, Any]:
        """The JSON object that is answered, with whatever status; empty if there is none."""
        assert self._session is not None
        try:
            async with self._session.get(url, allow_redirects=False) as answer:
                found = json.loads(await answer.read())
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
