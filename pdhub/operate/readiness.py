"""Is it ready? One GET that must answer 200."""

from __future__ import annotations

from types import TracebackType

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
