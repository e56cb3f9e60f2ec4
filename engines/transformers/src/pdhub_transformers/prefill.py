"""The embedded prefill instance."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pdhub.api import (
    Capabilities,
    EngineContext,
    EngineFailed,
    FirstToken,
    InvalidRequest,
    KVChunk,
    PrefillEngine,
    PrefillInfo,
    PrefillRequest,
    Region,
)
from pdhub_transformers.abilities import FEATURES, MAX_LOGPROBS
from pdhub_transformers.attention import Feed
from pdhub_transformers.config import TransformersConfig
from pdhub_transformers.model import LoadedModel, load_model
from pdhub_transformers.prompt import PromptRenderer
from pdhub_transformers.rows import Storage
from pdhub_transformers.sampling import Sampler, validate


class TransformersPrefill(PrefillEngine):
    """Chunks of all requests run one after another in one thread; the next chunk computes while one is sent."""

    def __init__(self, config: TransformersConfig, context: EngineContext) -> None:
        self._config = config
        self._context = context
        self._model: LoadedModel | None = None
        self._prompts: PromptRenderer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{context.name}-prefill")

    async def start(self) -> PrefillInfo:
        model, self._prompts = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        self._model = model
        capabilities = Capabilities(features=FEATURES, max_context=model.max_context, max_logprobs=MAX_LOGPROBS)
        return PrefillInfo(
            layout=model.layout,
            capabilities=capabilities,
            chunk_tokens=self._config.chunk_tokens,
            sampling_defaults=model.sampling_defaults,
            eos_token_ids=model.eos_token_ids,
        )

    def _load(self) -> tuple[LoadedModel, PromptRenderer]:
        model = load_model(self._config, self._context)
        return model, PromptRenderer(model.directory, model.vocabulary)

    def tokenize(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        return self._renderer().tokenize(body)

    def decode_text(self, token_ids: Sequence[int]) -> str:
        return self._renderer().decode(token_ids)

    async def prefill(self, request: PrefillRequest) -> AsyncIterator[KVChunk | FirstToken]:
        model = self._running()
        sampler = self._sampler(model, request)
        prompt, step = request.prompt_token_ids, self._config.chunk_tokens
        row = model.geometry.row(len(prompt))
        loop = asyncio.get_running_loop()

        def compute(start: int) -> asyncio.Future[torch.Tensor]:
            feed = Feed(row, start, prompt[start : start + step])
            return loop.run_in_executor(self._thread, _compute, model, feed)

        pending = compute(0)
        try:
            for start in range(0, len(prompt), step):
                logits = await asyncio.shield(pending)
                stop = min(start + step, len(prompt))
                if stop < len(prompt):
                    pending = compute(stop)  # other positions of the row, so this one may be copied meanwhile
                nbytes = model.layout.landing_bytes(stop - start)
                yield KVChunk(start, stop, nbytes, partial(_store, row, start, stop))
            token, logprob = sampler.pick(logits)
            yield FirstToken(token, logprob)
        finally:
            pending.cancel()  # a chunk that has begun runs to its end; it keeps the row alive

    async def close(self) -> None:
        self._model = None
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def _running(self) -> LoadedModel:
        if self._model is None:
            raise EngineFailed("the engine is not running")
        return self._model

    def _renderer(self) -> PromptRenderer:
        if self._prompts is None:
            raise EngineFailed("the engine is not running")
        return self._prompts

    def _sampler(self, model: LoadedModel, request: PrefillRequest) -> Sampler:
        """What picks the first token of a valid request. Raises InvalidRequest."""
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if len(prompt) > model.max_context:
            raise InvalidRequest(
                f"This model's maximum context length is {model.max_context} tokens. However, your prompt has "
                f"{len(prompt)} tokens. Please reduce the length of the prompt.",
                code="context_length_exceeded",
            )
        if not all(0 <= token < model.vocabulary for token in prompt):
            raise InvalidRequest("a token id is outside the vocabulary", param="prompt")
        validate(request.sampling, model.vocabulary, request.logprobs)
        sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        return Sampler(
            sampling,
            model.vocabulary,
            prompt,
            masked=[token for token in request.first_mask_ids if 0 <= token < model.vocabulary],
            min_tokens=1,
            logprobs=request.logprobs,
        )


def _compute(model: LoadedModel, feed: Feed) -> torch.Tensor:
    with torch.inference_mode():
        return model.chunk(feed).cpu()


def _store(row: Storage, start: int, stop: int, region: Region) -> None:
    if region.view is None:
        raise EngineFailed("this engine writes KV into host memory only")
    with torch.inference_mode():
        row.store(region.view, start, stop)
