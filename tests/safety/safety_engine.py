"""An engine that looks for strange bytes in its landings, and a prefill that can be held."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import safety_kv as kv
from pydantic import Field
from safety_board import LOOK_S, Board, Count, Gate
from safety_half import hold_half_way
from safety_transport import BoardTransport

from pdhub.api import (
    Capabilities,
    ClaimRequest,
    DecodeEngine,
    DecodeRequest,
    EngineContext,
    EngineInfo,
    EngineLoad,
    Feature,
    Finished,
    FinishReason,
    FirstToken,
    Handoff,
    KVChunk,
    Landing,
    PluginConfig,
    PrefillEngine,
    PrefillInfo,
    PrefillRequest,
    Region,
    RequestCancelled,
    TokenChunk,
)


class SafetyConfig(PluginConfig):
    """Options of the engine."""

    board: str = Field(description="File of the tree's board.")
    slots: int = Field(2, ge=1, description="Requests that decode at once.")

    def capabilities(self) -> Capabilities:
        return Capabilities(
            features=frozenset({Feature.IGNORE_EOS, Feature.MIN_TOKENS}), max_context=kv.CONTEXT, slots=self.slots
        )


class SafetyEngine(DecodeEngine):
    """Fills each landing when it is claimed, and looks at it when it is used, and when it is given back."""

    def __init__(self, config: SafetyConfig, context: EngineContext) -> None:
        self._config = config
        self._transport = context.transport
        self._board = Board(config.board)
        self._owners: dict[str, str] = {}
        self._addresses: set[int] = set()
        self._streams: dict[str, asyncio.Event] = {}

    async def start(self) -> EngineInfo:
        return EngineInfo(self._config.capabilities(), accepts=(kv.LAYOUT,), model="safety")

    def claim(self, request: ClaimRequest) -> Landing:
        tokens = max(kv.CAPACITY, -(-request.tokens // kv.BLOCK) * kv.BLOCK)
        region = self._transport.allocate(kv.LAYOUT.landing_bytes(tokens))
        _bytes(region)[:] = kv.UNTOUCHED
        if region.id in self._owners:
            self._board.complain(f"landing {region.id} was given twice")
        self._owners[region.id] = request.transfer_id
        self._board.add(Count.CLAIMED)
        if region.address in self._addresses:
            self._board.add(Count.REUSED)
        self._addresses.add(region.address)
        return Landing(region.id, tokens, kv.LAYOUT, (region,))

    async def inject(self, landing: Landing, handoff: Handoff) -> None:
        self._look(landing, "at inject")

    async def decode(self, landing: Landing, request: DecodeRequest) -> AsyncIterator[TokenChunk | Finished]:
        cancelled = self._streams.setdefault(request.transfer_id, asyncio.Event())
        view = landing.regions[0].view
        assert view is not None
        mark, prompt = kv.mark_in(view), request.prompt_token_ids
        held_at = mark % request.max_tokens
        try:
            self._compare(view, request.transfer_id, prompt, "before it decodes")
            for position in range(request.max_tokens):
                while position >= held_at and self._board.is_shut(Gate.DECODE) and not cancelled.is_set():
                    await asyncio.sleep(LOOK_S)
                await asyncio.sleep(0)
                if cancelled.is_set():
                    raise RequestCancelled("cancelled")
                yield TokenChunk((request.first_token if position == 0 else kv.letter(mark, position),))
            self._board.add(Count.DECODED)
            yield Finished(FinishReason.LENGTH, request.max_tokens)
        finally:
            self._streams.pop(request.transfer_id, None)
            self._compare(view, request.transfer_id, prompt, "after it decoded")

    def cancel(self, transfer_id: str) -> None:
        if event := self._streams.get(transfer_id):
            event.set()

    def release(self, landing: Landing) -> None:
        self._look(landing, "at release")
        del self._owners[landing.id]
        for region in landing.regions:
            self._transport.unregister(region.id)
        assert isinstance(self._transport, BoardTransport)
        if not self._owners and self._transport.count:
            self._board.complain(f"{self._transport.count} regions of the node are left over")

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._streams), waiting=0)

    async def close(self) -> None:
        if self._owners:
            self._board.complain(f"the node closed with landings of {sorted(self._owners.values())}")

    def _compare(self, view: memoryview, transfer_id: str, prompt: Sequence[int], when: str) -> None:
        if wrong := kv.differs(view, transfer_id, prompt):
            self._board.complain(f"transfer {transfer_id} {when}: {wrong}")

    def _look(self, landing: Landing, when: str) -> None:
        transfer_id = self._owners[landing.id]
        view = landing.regions[0].view
        assert view is not None
        if wrong := kv.foreign(view, transfer_id):
            self._board.complain(f"transfer {transfer_id} {when}: {wrong}")


class SafetyPrefill(PrefillEngine):
    """Writes marked KV; can be held before the join."""

    def __init__(self, config: SafetyConfig, context: EngineContext) -> None:
        self._config = config
        self._board = Board(config.board)

    async def start(self) -> PrefillInfo:
        hold_half_way(self._board, random.Random())
        return PrefillInfo(kv.LAYOUT, self._config.capabilities(), kv.CHUNK, {"temperature": 0.0})

    def tokenize(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        while self._board.is_shut(Gate.JOIN):
            time.sleep(LOOK_S)
        return tuple(str(body["prompt"]).encode())

    def decode_text(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode()

    async def prefill(self, request: PrefillRequest) -> AsyncIterator[KVChunk | FirstToken]:
        prompt = request.prompt_token_ids
        for start in range(0, len(prompt), kv.CHUNK):
            stop = min(start + kv.CHUNK, len(prompt))
            await asyncio.sleep(self._board.chunk_s())
            data = kv.kv(request.transfer_id, prompt, start, stop)
            yield KVChunk(start, stop, len(data), partial(_fill, data))
        yield FirstToken(kv.letter(kv.prompt_mark(prompt), 0))

    async def close(self) -> None:
        return None


def _bytes(region: Region) -> kv.Bytes:
    assert region.view is not None, "trials are in host memory"
    return np.frombuffer(region.view, np.uint8)


def _fill(data: kv.Bytes, region: Region) -> None:
    _bytes(region)[: len(data)] = data
