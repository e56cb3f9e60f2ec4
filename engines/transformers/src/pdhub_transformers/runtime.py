"""The decode engine that ``pdhub node`` hosts."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import torch

from pdhub.api import (
    AdmissionRejected,
    Capabilities,
    ClaimRequest,
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
    TokenChunk,
    TransferFailed,
)
from pdhub.onesided import region_bytes
from pdhub_transformers.abilities import CANCEL_WITHIN_S, FEATURES, MAX_LOGPROBS
from pdhub_transformers.config import TransformersConfig
from pdhub_transformers.landings import landing_device
from pdhub_transformers.model import LoadedModel, load_model
from pdhub_transformers.rows import Row, Storage
from pdhub_transformers.sampling import GREEDY_BELOW, Sampler, validate
from pdhub_transformers.speculation import PromptLookup
from pdhub_transformers.stream import Stream
from pdhub_transformers.worker import DecodeWorker

_log = logging.getLogger("pdhub.transformers")


@dataclass(slots=True)
class _Claim:
    """What stands behind a landing."""

    landing: Landing
    row: Storage
    prompt_tokens: int | None = None


class TransformersEngine(DecodeEngine):
    """Several slots with continuous batching; KV arrives in a landing and is copied into the request's row once."""

    def __init__(self, config: TransformersConfig, context: EngineContext) -> None:
        self._config = config
        self._context = context
        self._model: LoadedModel | None = None
        self._worker: DecodeWorker | None = None
        self._rows: list[Storage] = []
        self._claims: dict[str, _Claim] = {}
        self._streams: dict[str, Stream] = {}
        self._claimed = 0
        self._beside: torch.cuda.Stream | None = None
        self._landing_device = "cpu"
        self._landings = context.landings or config.slots + 1
        self._closed = False

    async def start(self) -> EngineInfo:
        config = self._config
        exact = config.batching == "exact" or (config.batching == "auto" and config.device == "cpu")
        width = config.slots * (config.speculation_tokens + 1 if config.speculation != "none" else 1)
        model = await asyncio.to_thread(load_model, config, self._context, exact_rows=width if exact else 0)
        self._rows = [model.geometry.row(model.max_context) for _ in range(self._landings)]
        device = model.geometry.device
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._landing_device = landing_device(self._context.transport, device)
        if device.type == "cuda" and not exact and config.graphs != "off":
            model = await asyncio.to_thread(_graphed, model, self._rows[0], config.graphs == "compiled")
        self._model = model
        self._worker = DecodeWorker(model, config.slots, asyncio.get_running_loop(), self._context.name)
        capabilities = Capabilities(
            features=FEATURES,
            max_context=model.max_context,
            max_logprobs=MAX_LOGPROBS,
            slots=config.slots,
            cancel_within_s=CANCEL_WITHIN_S,
        )
        return EngineInfo(capabilities, model.accepts, model.layout.model)

    def claim(self, request: ClaimRequest) -> Landing:
        model, _ = self._running()
        layout = next((own for own in model.accepts if own.fingerprint == request.layout.fingerprint), None)
        if layout is None:
            raise LayoutMismatch("this node takes another KV layout")
        if request.tokens < 1 or max(request.tokens, request.max_total_tokens) > model.max_context:
            raise InvalidRequest(
                f"This model's maximum context length is {model.max_context} tokens.", code="context_length_exceeded"
            )
        if not self._rows:
            raise AdmissionRejected("every landing is taken")
        tokens = model.geometry.rounded(request.tokens)
        regions = self._allocate(layout, tokens)
        self._claimed += 1
        landing = Landing(f"{self._context.name}-{self._claimed}", tokens, layout, regions)
        self._claims[landing.id] = _Claim(landing, self._rows.pop())
        return landing

    async def inject(self, landing: Landing, handoff: Handoff) -> None:
        claim = self._claim_of(landing)
        if len(landing.regions) != landing.layout.shards or not 1 <= handoff.prompt_tokens <= landing.tokens:
            raise TransferFailed(f"the landing does not hold {handoff.prompt_tokens} tokens")
        await asyncio.to_thread(self._load, claim.row, landing, handoff.prompt_tokens)
        claim.prompt_tokens = handoff.prompt_tokens

    def _load(self, row: Storage, landing: Landing, tokens: int) -> None:
        """Returns when the row has it. On a device it is copied beside the steps of other requests."""
        with torch.inference_mode(), torch.cuda.stream(self._beside):
            row.load([region_bytes(region) for region in landing.regions], tokens, landing.layout)
        if self._beside is not None:
            self._beside.synchronize()

    async def decode(self, landing: Landing, request: DecodeRequest) -> AsyncIterator[TokenChunk | Finished]:
        _, worker = self._running()
        stream = self._open(self._claim_of(landing), request)
        self._streams[request.transfer_id] = stream
        try:
            items = stream.first()
            stream.outbox.put(items)
            if not stream.outbox.ended.is_set():
                worker.submit(stream)
            while True:
                item = await stream.outbox.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if isinstance(item, Finished):
                    return
        finally:
            # the worker may still be writing into the row: the stream has ended when it says so
            if not stream.outbox.ended.is_set():
                worker.cancel(stream)
                await stream.outbox.ended.wait()
            del self._streams[request.transfer_id]

    def cancel(self, transfer_id: str) -> None:
        stream = self._streams.get(transfer_id)
        if stream is not None and self._worker is not None:
            self._worker.cancel(stream)

    def release(self, landing: Landing) -> None:
        claim = self._claims.pop(landing.id, None)
        if claim is None:
            return
        for region in claim.landing.regions:
            self._context.transport.unregister(region.id)
        self._rows.append(claim.row)

    def load(self) -> EngineLoad:
        if self._model is None or self._worker is None:
            return EngineLoad()
        running, waiting, remaining = self._worker.load()
        held = sum(claim.prompt_tokens or 0 for claim in self._claims.values())
        capacity = self._landings * self._model.max_context
        return EngineLoad(running, waiting, held / capacity, remaining)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            await asyncio.to_thread(self._worker.close)
        for claim in list(self._claims.values()):
            self.release(claim.landing)
        self._rows.clear()
        self._model = None

    def _allocate(self, layout: KVLayout, tokens: int) -> tuple[Region, ...]:
        """One region a shard. Raises AdmissionRejected."""
        devices = [self._landing_device] * layout.shards
        try:
            return self._context.transport.allocate_all(layout.landing_bytes(tokens), devices)
        except MemoryError as error:
            raise AdmissionRejected("no memory for another landing") from error

    def _running(self) -> tuple[LoadedModel, DecodeWorker]:
        if self._model is None or self._worker is None:
            raise EngineFailed("the engine is not running")
        return self._model, self._worker

    def _claim_of(self, landing: Landing) -> _Claim:
        claim = self._claims.get(landing.id)
        if claim is None:
            raise EngineFailed("the landing was released")
        return claim

    def _open(self, claim: _Claim, request: DecodeRequest) -> Stream:
        """The stream of a valid request. Raises InvalidRequest."""
        model, _ = self._running()
        prompt = request.prompt_token_ids
        if claim.prompt_tokens != len(prompt):
            raise TransferFailed(f"KV of {claim.prompt_tokens} tokens was injected for a prompt of {len(prompt)}")
        if request.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        if not 0 <= request.first_token < model.vocabulary:
            raise InvalidRequest("the first token is outside the vocabulary", param="first_token")
        validate(request.sampling, model.vocabulary, request.logprobs)
        sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        eos = frozenset(model.eos_token_ids)
        # An id that the model does not have never comes, so it ends nothing.
        ends = frozenset(token for token in request.stop_token_ids if 0 <= token < model.vocabulary)
        stop_ids = ends | (frozenset() if request.ignore_eos else eos)
        sampler = Sampler(
            sampling,
            model.vocabulary,
            prompt,
            masked=tuple(stop_ids | eos),  # as in vLLM: `min_tokens` keeps it out even if it would end nothing
            min_tokens=request.min_tokens,
            logprobs=request.logprobs,
        )
        lookup = None
        if self._config.speculation == "prompt_lookup" and sampling.temperature < GREEDY_BELOW:
            lookup = PromptLookup(
                (*prompt, request.first_token),
                ngram_max=self._config.speculation_ngram_max,
                ngram_min=self._config.speculation_ngram_min,
                limit=self._config.speculation_tokens,
            )
        return Stream(request, claim.row, sampler, stop_ids=stop_ids, max_context=model.max_context, lookup=lookup)


def _graphed(model: LoadedModel, row: Storage, compiled: bool) -> LoadedModel:
    """With its step of one request as a CUDA graph, if that can be done."""
    if not isinstance(row, Row):
        return model
    name = type(model.model).__name__
    try:
        from pdhub_transformers.graph import GraphedStep

        with torch.inference_mode(), torch.cuda.device(model.geometry.device):
            return replace(model, alone=GraphedStep(model, row, compiled=compiled))
    except Exception as error:  # noqa: BLE001 - compilers raise what they like, and the engine serves without a graph
        if compiled:
            _log.warning("%s: torch cannot compile the decode step: %s", name, error)
            return _graphed(model, row, compiled=False)
        _log.warning("%s: decode runs without a CUDA graph: %s", name, error)
        return model
