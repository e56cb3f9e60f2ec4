"""The decode engine that ``pdhub node`` hosts: TileRT behind its own adapter, filled over pdhub's hand-over."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pdhub.api import (
    AdmissionRejected,
    ClaimRequest,
    ConfigError,
    DecodeEngine,
    DecodeRequest,
    EngineContext,
    EngineFailed,
    EngineInfo,
    EngineLoad,
    Finished,
    Handoff,
    InvalidRequest,
    KVLayout,
    Landing,
    LayoutMismatch,
    Region,
    RequestCancelled,
    RequestError,
    TokenChunk,
    TransferFailed,
    model_identity,
)
from pdhub.onesided import region_bytes
from pdhub_tilert import loading
from pdhub_tilert.abilities import of_node
from pdhub_tilert.answer import Answer
from pdhub_tilert.asked import refuse, sampling_of
from pdhub_tilert.config import TileRTNodeConfig
from pdhub_tilert.injection import Layer, convert
from pdhub_tilert.landing import Planes, devices
from pdhub_tilert.loading import TileRT
from pdhub_tilert.planes import layouts, rounded
from pdhub_tilert.profiles import layers

log = logging.getLogger("pdhub.tilert")

T = TypeVar("T")


@dataclass(slots=True)
class _Claim:
    """What stands behind a landing. ``layers``: its KV, converted, from inject until TileRT has it."""

    landing: Landing
    prompt_tokens: int | None = None
    layers: list[Layer] | None = None


class TileRTEngine(DecodeEngine):
    """One slot. Everything of TileRT runs in one thread; landings are memory of their own, so that the next request's
    KV arrives meanwhile.

    Args:
        load: makes what :func:`pdhub_tilert.loading.load` does.
    """

    def __init__(
        self,
        config: TileRTNodeConfig,
        context: EngineContext,
        load: Callable[[TileRTNodeConfig], TileRT] | None = None,
    ) -> None:
        self._config, self._context = config, context
        self._load = load or loading.load
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{context.name}-tilert")
        self._most = context.landings or 2
        self._tilert: TileRT | None = None
        self._info: EngineInfo | None = None
        self._devices: tuple[str, ...] = ()
        self._claims: dict[str, _Claim] = {}
        self._answers: dict[str, Answer] = {}
        self._claimed = 0

    async def start(self) -> EngineInfo:
        model = _identity(self._context.model_path)
        tilert = self._tilert = await self._run(self._load, self._config)
        self._devices = devices(self._context.transport, self._config.shards)
        engine = tilert.engine
        told = {name: _says(engine, f"supports_{name}") for name in ("penalties", "ignore_eos", "logprobs")}
        capabilities = of_node(self._config, {"profile": self._config.profile.value, "capabilities": told})
        window = getattr(engine, "max_seq_len", None)
        if window is not None:
            capabilities = replace(capabilities, max_context=min(capabilities.max_context, int(window) - 1))
        log.info("%s: %s, landings on %s", self._context.name, type(engine).__name__, ", ".join(self._devices))
        self._info = EngineInfo(capabilities, layouts(self._config, model), model)
        return self._info

    def claim(self, request: ClaimRequest) -> Landing:
        _, info = self._running()
        layout = next((own for own in info.accepts if own.fingerprint == request.layout.fingerprint), None)
        if layout is None:
            raise LayoutMismatch("this node takes another KV layout")
        limit = info.capabilities.max_context
        if request.tokens < 1 or max(request.tokens, request.max_total_tokens) > limit:
            message = f"This model's maximum context length is {limit} tokens."
            raise InvalidRequest(message, code="context_length_exceeded")
        if len(self._claims) >= self._most:
            raise AdmissionRejected("every landing is taken")
        tokens = rounded(request.tokens)
        regions = self._allocate(layout, tokens)
        self._claimed += 1
        landing = Landing(f"{self._context.name}-{self._claimed}", tokens, layout, regions)
        self._claims[landing.id] = _Claim(landing)
        return landing

    async def inject(self, landing: Landing, handoff: Handoff) -> None:
        claim, (tilert, _) = self._claim_of(landing), self._running()
        if not 1 <= handoff.prompt_tokens <= landing.tokens:
            raise TransferFailed(f"the landing does not hold {handoff.prompt_tokens} tokens")
        count = layers(self._config.profile, self._config.mtp)

        def converted() -> list[Layer]:
            planes = Planes([region_bytes(region) for region in landing.regions], landing.layout, landing.tokens)
            return convert(planes, count, handoff.prompt_tokens, tilert)

        claim.layers = await self._run(converted)
        claim.prompt_tokens = handoff.prompt_tokens

    async def decode(self, landing: Landing, request: DecodeRequest) -> AsyncIterator[TokenChunk | Finished]:
        claim, (tilert, info) = self._claim_of(landing), self._running()
        refuse(request, info.capabilities)
        if claim.prompt_tokens != len(request.prompt_token_ids):
            lengths = f"{claim.prompt_tokens} tokens was injected for a prompt of {len(request.prompt_token_ids)}"
            raise TransferFailed(f"KV of {lengths}")
        answer = Answer(request, asyncio.get_running_loop())
        self._thread.submit(_decode, tilert, claim, request, answer)
        self._answers[request.transfer_id] = answer
        try:
            while True:
                item = await answer.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if isinstance(item, Finished):
                    return
        finally:
            answer.cancelled.set()
            await answer.ended.wait()  # until then TileRT is at it
            del self._answers[request.transfer_id]

    def cancel(self, transfer_id: str) -> None:
        answer = self._answers.get(transfer_id)
        if answer is not None:
            answer.cancelled.set()

    def release(self, landing: Landing) -> None:
        claim = self._claims.pop(landing.id, None)
        if claim is not None:
            for region in claim.landing.regions:
                self._context.transport.unregister(region.id)

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._answers), waiting=0, kv_usage=len(self._claims) / self._most)

    async def close(self) -> None:
        for answer in self._answers.values():
            answer.cancelled.set()
        await asyncio.to_thread(self._thread.shutdown)
        for claim in list(self._claims.values()):
            self.release(claim.landing)

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        """In TileRT's thread. Whoever waits is not let go before it is done: it reads a landing."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    def _allocate(self, layout: KVLayout, tokens: int) -> tuple[Region, ...]:
        """One region a shard. Raises AdmissionRejected."""
        try:
            return self._context.transport.allocate_all(layout.landing_bytes(tokens), self._devices)
        except MemoryError as error:
            raise AdmissionRejected("no memory for another landing") from error

    def _running(self) -> tuple[TileRT, EngineInfo]:
        if self._tilert is None or self._info is None:
            raise EngineFailed("the engine is not running")
        return self._tilert, self._info

    def _claim_of(self, landing: Landing) -> _Claim:
        claim = self._claims.get(landing.id)
        if claim is None:
            raise EngineFailed("the landing was released")
        return claim


def _decode(tilert: TileRT, claim: _Claim, request: DecodeRequest, answer: Answer) -> None:
    """One request, from its KV to its last token. In TileRT's thread."""
    engine, prompt = tilert.engine, request.prompt_token_ids
    kv, claim.layers = claim.layers, None
    last: Finished | BaseException
    try:
        if answer.cancelled.is_set():
            raise RequestCancelled("the request was cancelled")
        sampling = sampling_of(request)
        engine.inject(
            tilert.request(
                rid=request.transfer_id,
                seq_len=len(prompt),
                last_prompt_token=prompt[-1],
                first_token_id=request.first_token,
                sampling=sampling,
                layers=kv,
            )
        )
        kv = None
        answer.begin()
        wanted = {} if request.logprobs is None else {"top_logprobs": request.logprobs}
        tokens = engine.decode(
            first_token_id=request.first_token,
            max_tokens=request.max_tokens,
            sampling=sampling,
            on_token=answer.token,
            cancel_event=answer.cancelled,
            **wanted,
        )
        last = answer.finish(tokens, engine.last_stats.get("finish_reason"))
    except RequestError as error:
        last = error
    except Exception as error:
        log.exception("transfer %s: TileRT failed", request.transfer_id)
        last = EngineFailed("the engine failed")
        last.__cause__ = error
    try:
        engine.reset()
    except Exception:
        log.exception("TileRT's engine cannot be reset")
    answer.end(last)


def _says(engine: Any, question: str) -> bool:
    """What an engine supports; one that was not taught a question says no."""
    ask = getattr(engine, question, None)
    return bool(ask()) if callable(ask) else False


def _identity(model_path: str | None) -> str:
    """Of the model's ``config.json``, as prefill computes it. Raises ConfigError."""
    if model_path is None:
        hint = "the Hugging Face directory that the prefill instance serves"
        raise ConfigError("a hosted TileRT node needs model.path", where="model.path", hint=hint)
    path = Path(model_path).expanduser() / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", where="model.path") from error
    return model_identity(document)
