"""A deterministic toy engine without torch: the smallest complete engine, and the reference of our own tests.

Its "KV" of a token is a hash of everything up to that token, and its next token is a hash of *every byte* of the
KV. So a decode that equals :func:`generate` proves that the whole hand-over arrived in the right place: one
flipped, missing or foreign byte changes the answer. It speaks bytes: token id = byte value, 256 is end of
sequence; :func:`write_tokenizer` writes the matching ``tokenizer.json``.

It is a plugin (``toy``) like any other, registered by tests, never by an installed entry point.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from pdhub.api import (
    AdmissionRejected,
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
    GroupKind,
    Handoff,
    InvalidRequest,
    KVChunk,
    KVGroup,
    KVLayout,
    Landing,
    LayoutMismatch,
    PluginConfig,
    PrefillEngine,
    PrefillInfo,
    PrefillRequest,
    Region,
    RequestCancelled,
    Sampling,
    TokenChunk,
    TokenLogprob,
    hookimpl,
)

EOS = 256
ENTRY = 16
"""Bytes of one token's KV in one layer."""

FEATURES = frozenset(
    {
        Feature.SAMPLING,
        Feature.SEED,
        Feature.LOGPROBS,
        Feature.IGNORE_EOS,
        Feature.MIN_TOKENS,
        Feature.STOP_TOKEN_IDS,
    }
)


class ToyConfig(PluginConfig):
    """Options of the toy engine."""

    slots: int = Field(1, ge=1, description="Requests that decode at once.")
    layers: int = Field(2, ge=1, description="Layers of the pretended model; other numbers make other layouts.")
    block_tokens: int = Field(4, ge=1, description="Tokens a KV block.")
    max_context: int = Field(512, ge=8, description="Prompt plus output, in tokens.")
    chunk_tokens: int = Field(32, ge=1, description="Tokens a prefill chunk; a multiple of `block_tokens`.")
    chunk_ms: float = Field(0.0, ge=0, description="Pretended compute time of one chunk.")
    token_ms: float = Field(0.0, ge=0, description="Pretended compute time of one decode step.")
    eos_every: int = Field(0, ge=0, description="About one in so many tokens ends the sequence; 0 = never.")

    def layout(self) -> KVLayout:
        group = KVGroup(
            name="kv",
            kind=GroupKind.FULL,
            layers=tuple(range(self.layers)),
            block_tokens=self.block_tokens,
            block_bytes=self.block_tokens * ENTRY,
            axes=(f"token:{self.block_tokens}", f"byte:{ENTRY}"),
            dtype="uint8",
        )
        return KVLayout(model="toy", version=1, shards=1, groups=(group,))

    def capabilities(self) -> Capabilities:
        return Capabilities(features=FEATURES, max_context=self.max_context, max_logprobs=2, slots=self.slots)


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=ENTRY).digest()


def kv_entries(tokens: Sequence[int], layers: int) -> list[list[bytes]]:
    """``[layer][token]`` → that token's KV bytes."""
    out = []
    for layer in range(layers):
        chain, row = b"toy%d" % layer, []
        for token in tokens:
            chain = _hash(chain, token.to_bytes(4, "big"))
            row.append(chain)
        out.append(row)
    return out


class Chain:
    """The state that decode carries: a hash of all KV, then of every token."""

    def __init__(self, entries: list[list[bytes]], sampling: Sampling, config: ToyConfig) -> None:
        self._state = _hash(*(entry for row in entries for entry in row))
        self._seed = repr((sampling.seed, sampling.temperature)).encode() if sampling.temperature > 0 else b""
        self._config = config

    def push(self, token: int) -> None:
        self._state = _hash(self._state, token.to_bytes(4, "big"))

    def next(self, masked: frozenset[int]) -> TokenLogprob:
        """The next token (its two best, with pretended log probabilities), never one of ``masked``."""
        ranked: list[int] = []
        salt = 0
        while len(ranked) < 2:
            value = int.from_bytes(_hash(self._state, self._seed, bytes([salt % 256]))[:4], "big")
            every = self._config.eos_every
            token = EOS if every and value % every == 0 else 97 + value % 26
            salt += 1
            if token not in masked and token not in ranked:
                ranked.append(token)
        top = tuple((token, -0.25 - index) for index, token in enumerate(ranked))
        return TokenLogprob(ranked[0], -0.25, top)


def _masked(stop: Sequence[int], position: int, min_tokens: int) -> frozenset[int]:
    return frozenset({EOS, *stop}) if position <= min_tokens else frozenset()


def generate(
    prompt: Sequence[int],
    max_tokens: int,
    config: ToyConfig | None = None,
    sampling: Sampling | None = None,
    *,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
) -> list[int]:
    """What a request must answer: the reference, without any hand-over."""
    config = config or ToyConfig()
    chain = Chain(kv_entries(prompt, config.layers), sampling or Sampling(temperature=0.0), config)
    out: list[int] = []
    limit = min(max_tokens, config.max_context - len(prompt))
    while len(out) < limit:
        token = chain.next(_masked(stop_token_ids, len(out) + 1, min_tokens)).token_id
        out.append(token)
        chain.push(token)
        if token in stop_token_ids or (token == EOS and not ignore_eos):
            break
    return out


class ToyPrefill(PrefillEngine):
    """See :class:`pdhub.api.PrefillEngine`."""

    def __init__(self, config: ToyConfig, context: EngineContext) -> None:
        self._config = config
        self._layout = config.layout()

    async def start(self) -> PrefillInfo:
        return PrefillInfo(
            layout=self._layout,
            capabilities=self._config.capabilities(),
            chunk_tokens=self._config.chunk_tokens,
            sampling_defaults={"temperature": 0.0},
            eos_token_ids=(EOS,),
        )

    def tokenize(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        if "messages" in body:
            try:
                text = "".join(f"{m['role']}:{m['content']}\n" for m in body["messages"])
            except (TypeError, KeyError) as error:
                raise InvalidRequest("messages need a role and text content", param="messages") from error
            return tuple(text.encode())
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return tuple(prompt.encode())
        if isinstance(prompt, list) and all(isinstance(t, int) and 0 <= t <= EOS for t in prompt):
            return tuple(prompt)
        raise InvalidRequest("prompt must be text or token ids", param="prompt")

    def decode_text(self, token_ids: Sequence[int]) -> str:
        return bytes(t for t in token_ids if t < EOS).decode(errors="replace")

    async def prefill(self, request: PrefillRequest) -> AsyncIterator[KVChunk | FirstToken]:
        tokens, config = request.prompt_token_ids, self._config
        if len(tokens) >= config.max_context:
            raise InvalidRequest(f"prompt of {len(tokens)} tokens exceeds the context of {config.max_context}")
        entries = kv_entries(tokens, config.layers)
        for start in range(0, len(tokens), config.chunk_tokens):
            stop = min(start + config.chunk_tokens, len(tokens))
            await asyncio.sleep(config.chunk_ms / 1000)
            data = self._chunk(entries, start, stop)
            yield KVChunk(start, stop, len(data), functools.partial(_fill, data))
        chain = Chain(entries, request.sampling, config)
        best = chain.next(frozenset(request.first_mask_ids))
        yield FirstToken(best.token_id, _trim(best, request.logprobs))

    def _chunk(self, entries: list[list[bytes]], start: int, stop: int) -> bytes:
        size = self._config.block_tokens
        out = bytearray()
        for first in range(start, stop, size):
            for row in entries:
                out += b"".join(row[first : min(first + size, stop)]).ljust(size * ENTRY, b"\0")
        return bytes(out)

    async def close(self) -> None:
        return None


def _fill(data: bytes, region: Region) -> None:
    assert region.view is not None, "the toy engine lives in host memory"
    region.view[: len(data)] = data


def _trim(best: TokenLogprob, alternatives: int | None) -> TokenLogprob | None:
    return None if alternatives is None else TokenLogprob(best.token_id, best.logprob, best.top[:alternatives])


class ToyEngine(DecodeEngine):
    """See :class:`pdhub.api.DecodeEngine`."""

    def __init__(self, config: ToyConfig, context: EngineContext) -> None:
        self._config = config
        self._layout = config.layout()
        self._context = context
        self._limit = context.landings or config.slots + 1
        self._landings: dict[str, Landing] = {}
        self._entries: dict[str, list[list[bytes]]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}
        self._remaining: dict[str, int] = {}
        self._count = 0

    async def start(self) -> EngineInfo:
        return EngineInfo(self._config.capabilities(), accepts=(self._layout,), model="toy")

    def claim(self, request: ClaimRequest) -> Landing:
        if request.layout.fingerprint != self._layout.fingerprint:
            raise LayoutMismatch("the toy engine takes its own layout only")
        if request.max_total_tokens > self._config.max_context:
            raise InvalidRequest(f"{request.max_total_tokens} tokens exceed the context of {self._config.max_context}")
        if len(self._landings) >= self._limit:
            raise AdmissionRejected("all landings are taken")
        tokens = self._layout.groups[0].blocks(request.tokens) * self._config.block_tokens
        region = self._context.transport.allocate(self._layout.landing_bytes(tokens))
        self._count += 1
        landing = Landing(f"toy-{self._count}", tokens, self._layout, (region,))
        self._landings[landing.id] = landing
        return landing

    async def inject(self, landing: Landing, handoff: Handoff) -> None:
        view = landing.regions[0].view
        assert view is not None, "the toy engine lives in host memory"
        size = self._config.block_tokens
        rows: list[list[bytes]] = []
        for layer in range(self._config.layers):
            row = []
            for token in range(handoff.prompt_tokens):
                base = self._layout.block_offset(0, layer, token // size, landing.tokens) + token % size * ENTRY
                row.append(bytes(view[base : base + ENTRY]))
            rows.append(row)
        self._entries[landing.id] = rows

    async def decode(self, landing: Landing, request: DecodeRequest) -> AsyncIterator[TokenChunk | Finished]:
        _refuse(request, self._config)
        cancelled = self._cancelled.setdefault(request.transfer_id, asyncio.Event())
        chain = Chain(self._entries[landing.id], request.sampling, self._config)
        limit = min(request.max_tokens, self._config.max_context - len(request.prompt_token_ids))
        token, logprob = request.first_token, request.first_logprob
        try:
            for position in range(1, limit + 1):
                if position > 1:
                    await self._step(cancelled)
                    best = chain.next(_masked(request.stop_token_ids, position, request.min_tokens))
                    token, logprob = best.token_id, _trim(best, request.logprobs)
                chain.push(token)
                self._remaining[request.transfer_id] = limit - position
                asked = request.logprobs is not None and logprob is not None
                yield TokenChunk((token,), (logprob,) if asked and logprob else ())
                if token in request.stop_token_ids or (token == EOS and not request.ignore_eos):
                    yield Finished(FinishReason.STOP, position, token)
                    return
            yield Finished(FinishReason.LENGTH, limit)
        finally:
            self._cancelled.pop(request.transfer_id, None)
            self._remaining.pop(request.transfer_id, None)

    async def _step(self, cancelled: asyncio.Event) -> None:
        if self._config.token_ms and not cancelled.is_set():
            try:
                await asyncio.wait_for(cancelled.wait(), self._config.token_ms / 1000)
            except TimeoutError:
                return
        else:
            await asyncio.sleep(0)
        if cancelled.is_set():
            raise RequestCancelled("cancelled")

    def cancel(self, transfer_id: str) -> None:
        if event := self._cancelled.get(transfer_id):
            event.set()

    def release(self, landing: Landing) -> None:
        self._landings.pop(landing.id)
        self._entries.pop(landing.id, None)
        for region in landing.regions:
            self._context.transport.unregister(region.id)

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._remaining),
            waiting=0,
            kv_usage=len(self._landings) / self._limit,
            remaining_tokens=sum(self._remaining.values()),
        )

    async def close(self) -> None:
        for landing in list(self._landings.values()):
            self.release(landing)


def _refuse(request: DecodeRequest, config: ToyConfig) -> None:
    """Whatever is not declared is an error, never ignored."""
    s = request.sampling
    plain = Sampling()
    for name in ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if getattr(s, name) != getattr(plain, name) and s.temperature > 0:
            raise InvalidRequest(f"the toy engine has no {name}", param=name)
    if s.logit_bias:
        raise InvalidRequest("the toy engine has no logit_bias", param="logit_bias")
    if request.logprobs is not None and request.logprobs > config.capabilities().max_logprobs:
        raise InvalidRequest("the toy engine has two log probabilities a token", param="logprobs")


def write_tokenizer(directory: Path) -> Path:
    """Write ``tokenizer.json`` of the byte vocabulary and return the directory."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in printable}
    spare = iter(range(256, 512))
    vocab = {letters.get(b) or chr(next(spare)): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return directory


@hookimpl
def pdhub_register_engines() -> list[EngineSpec]:
    return [
        EngineSpec(
            name="toy",
            summary="Deterministic engine for tests: the answer depends on every byte of the KV.",
            config=ToyConfig,
            runtime=ToyEngine,
            prefill=ToyPrefill,
            declares=ToyConfig.capabilities,
        )
    ]
