"""Drives one engine without router and node: prefill → memory transport → claim, inject, decode."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pdhub.api import (
    ClaimRequest,
    DecodeEngine,
    DecodeRequest,
    EngineContext,
    EngineInfo,
    EngineSpec,
    Finished,
    FirstToken,
    Handoff,
    KVLayout,
    Landing,
    PrefillEngine,
    PrefillInfo,
    PrefillRequest,
    Sampling,
    TokenChunk,
    TokenLogprob,
)
from pdhub.testing.memory import MemoryTransport

GREEDY = Sampling(temperature=0.0)


@dataclass
class Answer:
    """What one stream gave."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    after_finish: int = 0

    def add(self, item: TokenChunk | Finished) -> None:
        if self.finished:
            self.after_finish += 1
        if isinstance(item, Finished):
            self.finished.append(item)
        else:
            self.tokens += item.token_ids
            self.logprobs += item.logprobs


@dataclass
class Received:
    """A landing with a prompt's KV in it and what prefill sampled."""

    landing: Landing
    prompt: tuple[int, ...]
    first: FirstToken
    nbytes: int


class EngineDriver:
    """Starts both facets of a spec and gives the steps of a hand-over one by one.

    Args:
        spec: needs ``runtime``; without ``prefill`` the user overrides :meth:`receive`.
        config: the validated options. model_path: for engines that load a model.
    """

    def __init__(self, spec: EngineSpec, config: Any, model_path: str | None = None, landings: int = 0) -> None:
        self.transport = MemoryTransport()
        context = EngineContext(self.transport, landings, model_path, name=spec.name)
        assert spec.runtime is not None, f"engine {spec.name} has no runtime facet"
        self.engine: DecodeEngine = spec.runtime(config, context)
        self.prefill: PrefillEngine | None = spec.prefill(config, context) if spec.prefill else None
        self.info: EngineInfo
        self.prefill_info: PrefillInfo | None = None
        self._ids = itertools.count(1)

    async def start(self) -> None:
        self.transport.open()
        self.info = await self.engine.start()
        if self.prefill is not None:
            self.prefill_info = await self.prefill.start()

    async def close(self) -> None:
        if self.prefill is not None:
            await self.prefill.close()
        await self.engine.close()
        self.transport.close()

    @property
    def layout(self) -> KVLayout:
        return self.info.accepts[0]

    def new_id(self) -> str:
        return f"kit-{next(self._ids)}"

    def claim(self, tokens: int, max_total: int | None = None, transfer_id: str | None = None) -> Landing:
        total = max_total if max_total is not None else min(tokens + 16, self.info.capabilities.max_context)
        return self.engine.claim(ClaimRequest(transfer_id or self.new_id(), tokens, total, self.layout))

    async def receive(
        self, prompt: Sequence[int], sampling: Sampling = GREEDY, logprobs: int | None = None, mask: Sequence[int] = ()
    ) -> Received:
        """Claim, prefill and copy every chunk to its place; not yet injected."""
        assert self.prefill is not None, "no prefill facet: override receive"
        landing = self.claim(len(prompt))
        request = PrefillRequest(self.new_id(), "kit", tuple(prompt), sampling, logprobs, tuple(mask))
        first: FirstToken | None = None
        nbytes = 0
        async for item in self.prefill.prefill(request):
            if isinstance(item, FirstToken):
                first = item
                continue
            staging = self.transport.allocate(item.nbytes)
            await asyncio.to_thread(item.write_into, staging)
            assert staging.view is not None
            self._place(landing, item.start, item.stop, staging.view)
            self.transport.unregister(staging.id)
            nbytes += item.nbytes
        assert first is not None, "prefill ended without a first token"
        return Received(landing, tuple(prompt), first, nbytes)

    def _place(self, landing: Landing, start: int, stop: int, data: memoryview) -> None:
        target, layout, position = landing.regions[0].view, landing.layout, 0
        assert target is not None
        for index, group in enumerate(layout.groups):
            blocks = range(start // group.block_tokens, group.blocks(stop))
            layers = range(len(group.layers))
            cells = (
                itertools.product(blocks, layers)
                if layout.order == "block_major"
                else ((b, n) for n in layers for b in blocks)
            )
            for block, layer in cells:
                offset = layout.block_offset(index, layer, block, landing.tokens)
                target[offset : offset + group.block_bytes] = data[position : position + group.block_bytes]
                position += group.block_bytes

    def request(self, received: Received, max_tokens: int = 8, **changes: Any) -> DecodeRequest:
        base = DecodeRequest(
            transfer_id=self.new_id(),
            request_id="kit",
            prompt_token_ids=received.prompt,
            first_token=received.first.token_id,
            max_tokens=max_tokens,
            sampling=GREEDY,
            first_logprob=received.first.logprob,
        )
        return replace(base, **changes)

    async def inject(self, received: Received) -> None:
        await self.engine.inject(received.landing, Handoff(len(received.prompt), received.nbytes))

    def stream(self, received: Received, request: DecodeRequest) -> AsyncIterator[TokenChunk | Finished]:
        return self.engine.decode(received.landing, request)

    async def decode(self, received: Received, request: DecodeRequest) -> Answer:
        """Inject, decode to the end, release."""
        answer = Answer()
        try:
            await self.inject(received)
            async for item in self.stream(received, request):
                answer.add(item)
        finally:
            self.engine.release(received.landing)
        return answer

    async def answer(self, prompt: Sequence[int], max_tokens: int = 8, **changes: Any) -> Answer:
        """One whole request."""
        sampling = changes.get("sampling", GREEDY)
        minimum = changes.get("min_tokens", 0)
        mask: tuple[int, ...] = ()
        if minimum and self.prefill_info is not None:
            mask = (*self.prefill_info.eos_token_ids, *changes.get("stop_token_ids", ()))
        received = await self.receive(prompt, sampling, changes.get("logprobs"), mask)
        return await self.decode(received, self.request(received, max_tokens, **changes))
