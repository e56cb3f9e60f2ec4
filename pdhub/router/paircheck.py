"""The self-check of a pair: a short greedy probe over both legs must equal the answer of one server alone.

KV that arrives damaged, or is laid out otherwise than decode reads it, gives a fluent wrong answer with status 200: no
breaker sees that. So a pair is compared before it is used, and again when one of its ends comes back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from pdhub.api.client import Call, EngineClient
from pdhub.api.errors import EngineFailed, LeaseExpired, PDHubError, RequestError, TransferFailed
from pdhub.api.policy import Health, Prediction
from pdhub.router import sampling as sampling_rules
from pdhub.router.attempt import Attempt, Choice
from pdhub.router.context import Context
from pdhub.router.endpoint import Endpoint
from pdhub.router.fleet import Pool, fits
from pdhub.router.flight import Flight, new_id
from pdhub.router.openai import COMPLETIONS_PATH, ClientRequest, parse_request
from pdhub.router.pairs import Pair, Verdict
from pdhub.router.view import view_of

log = logging.getLogger("pdhub.router.pairs")

PROBES = 3
"""Prompts that must all differ before a pair is called bad: two servers may round differently, and a near tie flips."""

TOKENS = 8
WITHIN_S = 60.0
"""For one probe. The first one over a pair pays for the connectors' handshake and may wait behind real requests."""

AGAIN_S = 30.0
"""Until a bad pair is checked again."""

AT_ONCE = 4

_TEXT = (
    "Number {nonce}. The keeper of the lighthouse wrote down every ship that passed: its name, its flag and the hour. "
    "When the fog came he rang the bell twice a minute, and in winter he counted the days until the mail boat. "
    "One evening a stranger asked him what he had learned in thirty years. He answered:"
)


class PairChecker:
    """Decides about pairs, in the background.

    Args:
        prefill_client: what speaks to a prefill instance, by name; None for one of `pdhub node`.
        told: called after a verdict, with it.
    """

    def __init__(
        self,
        context: Context,
        prefill_client: Callable[[str], EngineClient | None],
        told: Callable[[Verdict], None],
    ) -> None:
        self._context = dataclasses.replace(context, fleet=context.fleet.untaught())
        self._fleet = context.fleet
        self._prefill_client = prefill_client
        self._told = told
        self._here: set[str] = set()
        self._tasks: dict[Pair, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(AT_ONCE)

    def probed(self, endpoint: Endpoint) -> None:
        """After every probe: was it away, and is it here again?"""
        if endpoint.problem:
            # A probe that was merely late says nothing: a busy server is still the same process.
            if endpoint.gone or endpoint.health(self._context.clock()) in (Health.STARTING, Health.DOWN):
                self._here.discard(endpoint.name)
        elif endpoint.name not in self._here:
            self._here.add(endpoint.name)
            for pool, node, prefill in self._pairs_of(endpoint):
                self._due(pool, node, prefill)

    async def close(self) -> None:
        """Break off what runs."""
        tasks = [*self._tasks.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    def _pairs_of(self, endpoint: Endpoint) -> list[tuple[Pool, Endpoint, Endpoint]]:
        return [
            (pool, node, prefill)
            for pool in self._fleet.pools.values()
            if pool.needs_prefill
            for node in pool.nodes.values()
            for prefill in self._fleet.prefills_of(pool.name)
            if endpoint in (node, prefill) and {node.name, prefill.name} <= self._here
        ]

    def _due(self, pool: Pool, node: Endpoint, prefill: Endpoint) -> None:
        pair = (prefill.name, node.name)
        fitting = fits(prefill, pool.client.accepts(node.info))
        if not fitting or not self._references(pool, node, prefill, self._request(pool)):
            return
        self._fleet.pairs.due(pair)
        if (running := self._tasks.pop(pair, None)) is not None and not running.done():
            running.cancel()
            self._ending.add(running)
            running.add_done_callback(self._ending.discard)
        self._tasks[pair] = asyncio.create_task(self._check(pool, node, prefill), name=f"check {pair}")

    async def _check(self, pool: Pool, node: Endpoint, prefill: Endpoint) -> None:
        pair, pairs = (prefill.name, node.name), self._fleet.pairs
        while True:
            async with self._turns:
                before = pairs.of(*pair).why
                try:
                    why = await self._compared(pool, node, prefill)
                except _Undecided as error:
                    pairs.unknown(pair, str(error))
                    log.warning("'%s' → '%s' is used unchecked: %s", *pair, error)
                else:
                    if why:
                        pairs.bad(pair, why)
                        if why != before:
                            log.error("'%s' → '%s' is not used: %s", *pair, why)
                    else:
                        pairs.good(pair)
                        log.info("'%s' → '%s' answers as one server alone does", *pair)
            verdict = pairs.of(*pair).verdict
            self._told(verdict)
            self._fleet.changed()
            if verdict is not Verdict.BAD:
                return
            await asyncio.sleep(AGAIN_S)

    async def _compared(self, pool: Pool, node: Endpoint, prefill: Endpoint) -> str:
        """As :meth:`_compare`. A mistake in a plugin must not hold the pair for ever."""
        try:
            return await self._compare(pool, node, prefill)
        except _Undecided:
            raise
        except Exception as error:
            log.exception("the self-check of '%s' → '%s' failed", prefill.name, node.name)
            raise _Undecided(f"the self-check failed: {error!r}") from error

    async def _compare(self, pool: Pool, node: Endpoint, prefill: Endpoint) -> str:
        """Why the pair is bad; empty if it is good. Raises _Undecided."""
        answers = ""
        for _ in range(PROBES):
            request = self._request(pool)
            got = await self._over_both(pool, node, prefill, request)
            if isinstance(got, str):
                return got
            expected = await self._alone(pool, node, prefill, request)
            if _same(got, expected):
                return ""
            answers = f"it answers {_shown(got)} where one server alone answers {_shown(expected)}"
        return answers

    def _request(self, pool: Pool) -> ClientRequest:
        """A prompt that no cache has: KV must really move."""
        model = self._context.plan.config.model
        body = {
            "model": model.name,
            "prompt": _TEXT.format(nonce=secrets.randbelow(10**9))[: max(16, pool.capabilities.max_context // 4)],
            "max_tokens": TOKENS,
            "temperature": 0,
            "return_token_ids": True,
        }
        return parse_request(COMPLETIONS_PATH, json.dumps(body).encode(), model.name, model.aliases)

    async def _over_both(
        self, pool: Pool, node: Endpoint, prefill: Endpoint, request: ClientRequest
    ) -> Mapping[str, Any] | str:
        """The answer, or what is wrong with the pair."""
        attempt, sink = self._attempt(pool, node, prefill, request), _Kept()
        try:
            async with asyncio.timeout(WITHIN_S):
                await attempt.run(sink)
        except TimeoutError:
            return f"a short request takes longer than {WITHIN_S:g} s over it"
        except (TransferFailed, LeaseExpired, EngineFailed) as error:
            return error.message
        except RequestError as error:
            raise _Undecided(error.message) from error
        return sink.document()

    def _attempt(self, pool: Pool, node: Endpoint, prefill: Endpoint, request: ClientRequest) -> Attempt:
        context = self._context
        flight = Flight.begin({}, context.clock(), context.rules)
        sampling = sampling_rules.resolve(request.body, {})
        view = view_of(
            request, flight.asked, sampling, [pool.capabilities], id=flight.id, headers={}, arrived_s=flight.arrived,
            wall_s=flight.wall_s,
        )  # fmt: skip
        choice = Choice(pool, node, prefill)
        return Attempt(context, choice, request, view, sampling, flight, WITHIN_S, Prediction())

    async def _alone(self, pool: Pool, node: Endpoint, prefill: Endpoint, request: ClientRequest) -> Mapping[str, Any]:
        """The answer of the prefill instance, else of the node. Raises _Undecided."""
        for endpoint, call in self._references(pool, node, prefill, request):
            try:
                async with asyncio.timeout(WITHIN_S):
                    return await self._context.caller.document(endpoint, call, request, {"x-request-id": new_id()})
            except (PDHubError, TimeoutError) as error:
                raise _Undecided(f"'{endpoint.name}' alone does not answer: {error}") from error
        raise _Undecided("neither side answers alone")

    def _references(
        self, pool: Pool, node: Endpoint, prefill: Endpoint, request: ClientRequest
    ) -> list[tuple[Endpoint, Call]]:
        """Who can answer without a hand-over, and how."""
        whole = self._attempt(pool, node, prefill, request).leg
        found = []
        for endpoint, client in ((prefill, self._prefill_client(prefill.name)), (node, pool.client)):
            leg = dataclasses.replace(whole, transfer_id=new_id(), decode=endpoint.target(), prefill=None)
            if client is not None and (call := client.alone(leg)) is not None:
                found.append((endpoint, call))
        return found


class _Undecided(Exception):
    """The probe says nothing about the pair."""


class _Kept:
    """A sink that keeps one document."""

    def __init__(self) -> None:
        self.started = False
        self._data = bytearray()

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True

    async def write(self, data: bytes) -> None:
        self._data += data

    async def end(self) -> None:
        return None

    def document(self) -> Mapping[str, Any]:
        found = json.loads(bytes(self._data))
        return found if isinstance(found, dict) else {}


def _said(document: Mapping[str, Any]) -> tuple[str | None, list[int] | None]:
    choices = document.get("choices") or [{}]
    ids = choices[0].get("token_ids")
    return choices[0].get("text"), ids if isinstance(ids, list) and ids else None


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """By token ids where both tell them: different ids may make the same text."""
    (text, ids), (other_text, other_ids) = _said(a), _said(b)
    return ids == other_ids if ids and other_ids else text == other_text


def _shown(document: Mapping[str, Any]) -> str:
    text, ids = _said(document)
    return str(ids) if ids else repr(text)
