"""What engines tell of their prefix caches, kept by endpoint, and read for each request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence

from pdhub.api.cache import CacheEvent, CacheFeed, CacheReset
from pdhub.api.client import EngineClient
from pdhub.api.request import Feature
from pdhub.core.blocks import BlockIndex, chain
from pdhub.core.marks import Marks
from pdhub.router.endpoint import Endpoint
from pdhub.router.openai import ClientRequest
from pdhub.router.prefix import share_of_block

log = logging.getLogger("pdhub.router.caches")

PAUSE_S = 5.0
"""Before a feed that ended or failed is opened again."""

SIZES = 4
"""Block sizes of which prompts are learned; a fleet has one or two."""


class Caches:
    """Empty, and free of cost, where no engine tells anything."""

    def __init__(self) -> None:
        self._indexes: dict[str, list[BlockIndex]] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._feeds: dict[str, Sequence[CacheFeed]] = {}
        self._marks = Marks()

    def watch(self, endpoint: Endpoint, client: EngineClient) -> None:
        """Open the endpoint's feeds, if it has any. Raises ConfigError if what they need is not installed."""
        feeds = client.cache_feeds(endpoint.target())
        if feeds:
            self._feeds[endpoint.name] = feeds
            self._indexes[endpoint.name] = [BlockIndex() for _ in feeds]
            self._listen(endpoint.name)
            log.info("'%s' is to tell what its cache holds; until it does, that is unknown", endpoint.name)

    def gone(self, name: str) -> None:
        """Nobody listens at the endpoint any more: whoever comes back has another cache."""
        if name in self._feeds and any(map(len, self._indexes[name])):
            for task in self._tasks[name]:
                task.cancel()
            for index in self._indexes[name]:
                index.apply([CacheReset(empty=False)])
            self._listen(name)

    async def close(self) -> None:
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    def blocks(self) -> Iterator[tuple[str, int]]:
        """Blocks known a telling endpoint."""
        for name, indexes in self._indexes.items():
            yield name, sum(map(len, indexes))

    def shares(self, request: ClientRequest) -> Mapping[str, float]:
        """As :attr:`~pdhub.api.request.RequestView.cached`. Of several caches behind one address, the best one's."""
        if not self._indexes or not _plain(request):
            return {}
        ids = _token_ids(request)
        digests: dict[int, tuple[list[int], int]] = {}
        shares = {}
        for name, indexes in self._indexes.items():
            told = []
            for index in indexes:
                if size := index.block_tokens:
                    if size not in digests:
                        digests[size] = self._digests(request, ids, size)
                    wanted, parts = digests[size]
                    depth = index.depth(wanted)
                    if wanted and (depth or index.complete):
                        told.append(min(1.0, depth / parts))
            if told:
                shares[name] = max(told)
        return shares

    def learn(self, request: ClientRequest, token_ids: Sequence[int]) -> None:
        """Prefill told the prompt's tokens."""
        sizes = {i.block_tokens for indexes in self._indexes.values() for i in indexes if i.block_tokens}
        if not sizes or not request.prefix or not _plain(request) or _token_ids(request) is not None:
            return
        share = share_of_block(request.body, request.chat)
        for size in sorted(sizes)[:SIZES]:
            self._marks.learn(request.prefix, share, token_ids, size)

    def _digests(self, request: ClientRequest, ids: Sequence[int] | None, size: int) -> tuple[list[int], int]:
        """What to look for, and how many would be the whole prompt."""
        if ids is not None:
            return chain(ids, size), max(1, len(ids) // size)
        return self._marks.of(request.prefix, size), len(request.prefix)

    def _listen(self, name: str) -> None:
        pairs = zip(self._feeds[name], self._indexes[name], strict=True)
        self._tasks[name] = [
            asyncio.create_task(_run(name, feed, index), name=f"cache of {name}") for feed, index in pairs
        ]


async def _run(name: str, feed: CacheFeed, index: BlockIndex) -> None:
    def told(events: Sequence[CacheEvent]) -> None:
        index.apply(events)

    while True:
        try:
            await feed.run(told)
        except Exception as error:  # noqa: BLE001 - a plugin's; requests go on without it, and the log says so
            log.warning("what the cache of '%s' holds is unknown: %s", name, error or type(error).__name__)
        index.apply([CacheReset(empty=False)])
        await asyncio.sleep(PAUSE_S)


def _plain(request: ClientRequest) -> bool:
    """Its blocks are shared with every other prompt of the same tokens."""
    return Feature.MULTIMODAL not in request.features and not request.body.get("cache_salt")


def _token_ids(request: ClientRequest) -> Sequence[int] | None:
    prompt = None if request.chat else request.body["prompt"]
    if isinstance(prompt, list) and isinstance(prompt[0], list):
        prompt = prompt[0]
    return prompt if isinstance(prompt, list) and isinstance(prompt[0], int) else None
