"""The node-side contract of an engine: the runtime that ``pdhub node`` hosts.

The host owns leases, generations, quarantine, the control channel and the slot queue. The engine owns memory
layout, compute and tokens. An engine never sees a writer and never decides when a landing may be reused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pdhub.api.layout import KVLayout
from pdhub.api.request import Feature, Sampling
from pdhub.api.transport import Region, Transport


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do. Absent means no: whatever is not declared here must be refused by the engine
    with :class:`~pdhub.api.errors.InvalidRequest`, never ignored (the kit proves both).

    Args:
        features: beyond plain greedy generation.
        max_context: tokens of prompt plus output.
        max_logprobs: most alternatives a token; meaningful with ``Feature.LOGPROBS``.
        slots: requests that decode at once.
        cancel_within_s: a cancelled stream has ended after this many seconds at most.
        max_top_k: widest ``top_k`` that is applied; meaningful with ``Feature.TOP_K``. None = any.
        logprobs_from: lowest temperature, 0 aside, at which log probabilities are given; meaningful with
            ``Feature.LOGPROBS``.
    """

    features: frozenset[Feature] = frozenset()
    max_context: int = 0
    max_logprobs: int = 0
    slots: int = 1
    cancel_within_s: float = 1.0
    max_top_k: int | None = None
    logprobs_from: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What :meth:`DecodeEngine.start` returns.

    Args:
        capabilities: see :class:`Capabilities`.
        accepts: layouts that ``inject`` understands, best first. Empty = no KV handoff.
        model: served model's identity, as in :attr:`KVLayout.model`.
    """

    capabilities: Capabilities
    accepts: tuple[KVLayout, ...]
    model: str = ""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Ask for a landing.

    Args:
        transfer_id: the only key; minted by the router, unguessable, unique.
        tokens: capacity in tokens that the landing must have (prompt only; output needs no landing).
        max_total_tokens: prompt plus capped output that the engine must be able to hold while decoding.
        layout: the writer's layout, one of :attr:`EngineInfo.accepts`.
    """

    transfer_id: str
    tokens: int
    max_total_tokens: int
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class Landing:
    """Memory reserved for one request's KV.

    Args:
        id: unique for the engine's life.
        tokens: capacity, at least the claimed one; it fixes the block offsets of the layout.
        regions: one a shard of the layout, from :attr:`EngineContext.transport`.
    """

    id: str
    tokens: int
    layout: KVLayout
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Handoff:
    """What arrived: given to :meth:`DecodeEngine.inject` after all writers were done or fenced.

    Args:
        prompt_tokens: tokens whose KV lies in the landing.
        bytes: written by all writers together.
    """

    prompt_tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (natural) of one token and of its best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """Continue one request whose KV was injected.

    Args:
        transfer_id: key, as in the claim.
        request_id: for logs only.
        prompt_token_ids: the whole prompt, exactly as prefill tokenised it.
        first_token: what prefill sampled; the engine yields it first and never samples it again.
        first_logprob: its log probability if asked for.
        max_tokens: completion tokens including the first; at least 1.
        min_tokens: neither EOS nor a stop id may be among the first so many tokens (as vLLM counts).
        ignore_eos: an end-of-sequence token does not end the request.
        stop_token_ids: further ids that end it (the id is part of the stream; the router hides its text).
        logprobs: None = off, else how many alternatives.
    """

    transfer_id: str
    request_id: str
    prompt_token_ids: tuple[int, ...]
    first_token: int
    max_tokens: int
    sampling: Sampling = Sampling()
    first_logprob: TokenLogprob | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """One or more new tokens; ``logprobs`` has one entry a token if they were asked for, else it is empty."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Finished:
    """The single last item of a stream.

    Args:
        reason: ``stop`` for EOS or a stop id, ``length`` for ``max_tokens`` or the end of the context.
        completion_tokens: tokens yielded, the first one included.
        stop_token: the id that ended it; None for ``length``.
    """

    reason: FinishReason
    completion_tokens: int
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A momentary reading; None = unknown (which is not idle).

    ``expired`` counts prompts whose KV a prefill instance has given up, since it started, when their lease had ended.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    remaining_tokens: int | None = None
    expired: int | None = None


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What the host gives a runtime.

    Args:
        transport: open, for :meth:`Transport.allocate` and :meth:`Transport.register`.
        landings: how many landings may be claimed at once (config; default slots + 1).
        model_path: directory or file of the model; None if the engine needs none.
        name: the node's name, for logs.
        threads: CPU threads the engine may use; 0 = its own choice.
    """

    transport: Transport
    landings: int
    model_path: str | None = None
    name: str = "node"
    threads: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)


class DecodeEngine(ABC):
    """One engine in one node. All methods run on the node's event loop; anything that takes more than a
    millisecond goes to the engine's own threads."""

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Once, first. Load everything; the node is ready when it returns.

        Raises:
            ConfigError: missing model, impossible settings. PluginError: a missing library.
        """

    @abstractmethod
    def claim(self, request: ClaimRequest) -> Landing:
        """Reserve a landing: fast, all or nothing, disjoint from every landing that was not released.

        Raises:
            AdmissionRejected: no memory now (contended).
            InvalidRequest: it can never fit.
            LayoutMismatch: ``request.layout`` is not accepted.
        """

    @abstractmethod
    async def inject(self, landing: Landing, handoff: Handoff) -> None:
        """Make the KV usable. Once a landing, after all writers are done and fenced, before ``decode``.

        Nothing of it may be seen by another request. Raises TransferFailed if the content is unusable.
        """

    @abstractmethod
    def decode(self, landing: Landing, request: DecodeRequest) -> AsyncIterator[TokenChunk | Finished]:
        """Stream tokens: the first is ``request.first_token``; exactly one :class:`Finished`, last.

        Called once a landing after ``inject``; at most ``capabilities.slots`` streams are open at once.

        Raises:
            InvalidRequest: before the first item, for anything not declared in the capabilities.
            RequestCancelled: after :meth:`cancel`. EngineFailed: anything else.
        """

    @abstractmethod
    def cancel(self, transfer_id: str) -> None:
        """End this stream within ``capabilities.cancel_within_s``. Idempotent; unknown ids are ignored."""

    @abstractmethod
    def release(self, landing: Landing) -> None:
        """Take the landing back and free its regions. Exactly once a claim, in any state, never while its
        stream runs and never while a write could still hit it."""

    @abstractmethod
    def load(self) -> EngineLoad:
        """Cheap reading for the router."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything. Idempotent."""
