"""What engines tell of their caches, as requests see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

import pytest

from pdhub.api import BlocksStored, CacheEvent, CacheFeed, CacheReset, RequestRecord, RequestView
from pdhub.api.policy import NodeView, PoolView
from pdhub.policies.affinity import PrefixAffinityConfig, PrefixAffinityScorer
from pdhub.router.breaker import Breaker
from pdhub.router.caches import Caches
from pdhub.router.clients.openai import OpenAIClient, OpenAIConfig
from pdhub.router.endpoint import Endpoint
from pdhub.router.fleet import EVERYTHING
from pdhub.router.openai import COMPLETIONS_PATH, ClientRequest, parse_request

SIZE = 16
TEXT = "the quick brown fox jumps over the lazy dog and runs away " * 60  # 3480 bytes: 6 text blocks


class Told(CacheFeed):
    def __init__(self) -> None:
        self.queue: asyncio.Queue[Sequence[CacheEvent] | None] = asyncio.Queue()

    async def run(self, told: Callable[[Sequence[CacheEvent]], None]) -> None:
        while (events := await self.queue.get()) is not None:
            told(events)
        raise OSError("nobody there")


class Client(OpenAIClient):
    def __init__(self, *feeds: CacheFeed) -> None:
        super().__init__(OpenAIConfig())
        self._feeds = feeds

    def cache_feeds(self, node: object) -> Sequence[CacheFeed]:
        return self._feeds


def endpoint(name: str) -> Endpoint:
    return Endpoint(name, "http://127.0.0.1:1", breaker=Breaker(1, 1.0, 1.0), probe_failures=1, hosted=False)


def asked(prompt: str | list[int], **more: object) -> ClientRequest:
    raw = json.dumps({"model": "m", "prompt": prompt, **more}).encode()
    return parse_request(COMPLETIONS_PATH, raw, "m", ())


def tokens(text: str) -> list[int]:
    """One a word."""
    return [sum(word.encode()) for word in text.split()]


def stored(ids: list[int]) -> BlocksStored:
    full = len(ids) // SIZE * SIZE
    names = tuple(tuple(ids[: end + SIZE]) for end in range(0, full, SIZE))
    return BlocksStored(names, None, tuple(ids[:full]), SIZE)


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not what():
            await asyncio.sleep(0.005)


@pytest.fixture
async def caches():
    found = Caches()
    yield found
    await found.close()


async def test_ids_are_compared_exactly(caches: Caches) -> None:
    feed = Told()
    caches.watch(endpoint("a"), Client(feed))
    ids = list(range(160))
    assert caches.shares(asked(ids)) == {}, "nothing was told yet: unknown"
    feed.queue.put_nowait([CacheReset(empty=True), stored(ids[:80])])
    await until(lambda: sum(blocks for _, blocks in caches.blocks()))
    assert caches.shares(asked(ids)) == {"a": 0.5}
    assert caches.shares(asked(ids[1:])) == {"a": 0.0}
    assert caches.shares(asked(ids, cache_salt="s")) == {}, "salted blocks are others"


async def test_text_is_compared_once_prefill_has_told_its_tokens(caches: Caches) -> None:
    feed = Told()
    caches.watch(endpoint("a"), Client(feed))
    feed.queue.put_nowait([CacheReset(empty=True), stored(tokens(TEXT))])
    await until(lambda: sum(blocks for _, blocks in caches.blocks()))
    assert caches.shares(asked(TEXT)) == {}, "its tokens are not known"
    caches.learn(asked(TEXT), tokens(TEXT))
    assert caches.shares(asked(TEXT)) == {"a": 1.0}
    assert caches.shares(asked(TEXT[:2000] + "another end " * 200))["a"] == pytest.approx(3 / 8)
    feed.queue.put_nowait([CacheReset(empty=True)])
    await until(lambda: caches.shares(asked(TEXT)) == {"a": 0.0})


async def test_of_a_feed_that_lost_events_only_what_it_still_tells_counts(caches: Caches) -> None:
    feed = Told()
    caches.watch(endpoint("a"), Client(feed))
    ids = list(range(64))
    feed.queue.put_nowait([CacheReset(empty=False), stored(ids)])
    await until(lambda: caches.shares(asked(ids)) == {"a": 1.0})
    assert caches.shares(asked(list(range(500, 600)))) == {}, "it may have been stored before"


@pytest.mark.parametrize("how", ["its feed fails", "nobody listens at the endpoint"])
async def test_what_may_have_changed_unseen_is_unknown(caches: Caches, how: str) -> None:
    feed = Told()
    caches.watch(endpoint("a"), Client(feed))
    ids = list(range(64))
    feed.queue.put_nowait([CacheReset(empty=True), stored(ids)])
    await until(lambda: caches.shares(asked(ids)) == {"a": 1.0})
    if how == "its feed fails":
        feed.queue.put_nowait(None)
    else:
        caches.gone("a")
    await until(lambda: caches.shares(asked(ids)) == {})
    assert dict(caches.blocks()) == {"a": 0}


async def test_who_tells_nothing_costs_nothing(caches: Caches) -> None:
    caches.watch(endpoint("a"), Client())
    caches.learn(asked(TEXT), tokens(TEXT))
    assert caches.shares(asked(TEXT)) == {}
    assert list(caches.blocks()) == []


def test_affinity_goes_by_what_is_told_and_else_by_what_was_sent() -> None:
    scorer = PrefixAffinityScorer(PrefixAffinityConfig())
    pool = PoolView("p", frozenset({"m"}), EVERYTHING, ())
    nodes = [(pool, NodeView(name, "p")) for name in ("told", "other")]
    view = RequestView("r", "m", COMPLETIONS_PATH, 10, prefix=(1, 2, 3, 4), cached={"told": 0.25})
    assert list(scorer.score(view, nodes, 0.0)) == [0.25, 0.0]
    scorer.observe(RequestRecord("r", "m", "p", "other", None, "", "ok", prefix=(1, 2)))
    assert list(scorer.score(view, nodes, 0.0)) == [0.25, 0.5]
