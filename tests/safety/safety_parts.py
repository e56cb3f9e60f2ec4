"""Plugin of the safety trials: an engine that looks for strange bytes, a prefill that can be held, a bad transport."""

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
from safety_board import Board, Count, Gate
from safety_half import hold_half_way

from pdhub.api import (
    Capabilities,
    ClaimRequest,
    DecodeEngine,
    DecodeRequest,
    EngineContext,
    EngineInfo,
    EngineLoad,
    EngineSpec,
    Feature,
    Finished,
    FinishReason,
    FirstToken,
    Grant,
    Handoff,
    KVChunk,
    Landing,
    OnDone,
    Peer,
    PluginConfig,
    PrefillEngine,
    PrefillInfo,
    PrefillRequest,
    Region,
    RequestCancelled,
    TokenChunk,
    Transfer,
    Transport,
    TransportSpec,
    WriteOp,
    hookimpl,
)
from pdhub.registry import load
from pdhub.testing.faults import Faults, FaultyTransport

LOOK_S = 0.003


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


class BoardTransport(FaultyTransport):
    """Any transport, with the faults that the board says; most writes wait where it says so."""

    def __init__(self, inner: Transport, board: Board) -> None:
        super().__init__(inner, Faults())
        self.name = "board"
        self._board = board

    @property
    def count(self) -> int:
        """Regions that are known here."""
        return len(self._regions)

    def fence(self, region_id: str, within_s: float) -> bool:
        return self.inner.fence(region_id, within_s)  # only the writing side is bad

    def write(
        self,
        peer: Peer,
        grant: Grant,
        ops: Sequence[WriteOp],
        notify: bytes | None = None,
        on_done: OnDone | None = None,
    ) -> Transfer:
        self.faults = self._board.faults()
        return super().write(peer, grant, ops, notify, on_done)

    def _start(self, *posted: Any) -> None:
        if self._board.is_shut(Gate.WRITE) and self._rng.random() < 0.6:
            self._hold(*posted)
        else:
            super()._start(*posted)

    def _hold(self, *posted: Any) -> None:
        if self._board.is_shut(Gate.WRITE) and not self._closed:
            self.later(LOOK_S, partial(self._hold, *posted))
        else:
            super()._start(*posted)


class BoardTransportConfig(PluginConfig):
    """Options of the transport."""

    board: str = Field(description="File of the tree's board.")
    inner: str = Field(description="Name of the transport that moves the bytes.")
    options: dict[str, Any] = Field(default_factory=dict, description="Its options.")

    def make(self) -> Transport:
        spec = load(warn=False).transport(self.inner)
        return BoardTransport(spec.factory(spec.config.model_validate(self.options)), Board(self.board))


def _bytes(region: Region) -> kv.Bytes:
    assert region.view is not None, "trials are in host memory"
    return np.frombuffer(region.view, np.uint8)


def _fill(data: kv.Bytes, region: Region) -> None:
    _bytes(region)[: len(data)] = data


@hookimpl
def pdhub_register_engines() -> list[EngineSpec]:
    return [
        EngineSpec(
            name="safety",
            summary="Looks for another request's bytes in its landings.",
            config=SafetyConfig,
            runtime=SafetyEngine,
            prefill=SafetyPrefill,
            declares=SafetyConfig.capabilities,
        )
    ]


@hookimpl
def pdhub_register_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            name="board",
            summary="Another transport, with faults on request.",
            config=BoardTransportConfig,
            factory=lambda config: config.make(),
        )
    ]
