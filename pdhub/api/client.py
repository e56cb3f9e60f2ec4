"""The router-side contract of an engine: a *sans-IO* client that only describes calls.

The host opens every connection, applies the patch to the client's bytes, sends credentials, watches
time-outs, traces, relays and aborts. A client can therefore not leak a connection, follow a redirect or
reach a host that the configuration does not name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from pdhub.api.cache import CacheFeed
from pdhub.api.engine import Capabilities, EngineLoad, Finished, TokenChunk, TokenLogprob
from pdhub.api.errors import RequestError
from pdhub.api.request import RequestView, Sampling


class LegOrder(StrEnum):
    """``PREFILL_FIRST``: decode starts after the prefill answered. ``TOGETHER``: both at once.
    ``DECODE_ONLY``: the engine prefills itself."""

    PREFILL_FIRST = "prefill_first"
    TOGETHER = "together"
    DECODE_ONLY = "decode_only"


class Bind(StrEnum):
    """When the decode node is chosen: ``EARLY`` before prefill (a claim or a push needs it), ``LATE`` after."""

    EARLY = "early"
    LATE = "late"


class Reply(StrEnum):
    """How the host reads an answer: relay bytes to the client, parse token frames, one JSON document, or text, which
    a client gets as ``{"text": …}``."""

    RELAY = "relay"
    TOKENS = "tokens"
    JSON = "json"
    TEXT = "text"


class Freed(StrEnum):
    """What frees the KV of a hand-over that nobody finishes.

    ``CANCEL``: the call of :meth:`EngineClient.cancel`. ``CLOSE``: closing the connections of the legs. ``LEASE``:
    while a leg runs, closing its connection; after prefill answered, nothing but the end of ``lease_s``: the host
    counts what is left to it.
    """

    CANCEL = "cancel"
    CLOSE = "close"
    LEASE = "lease"


class Base(StrEnum):
    """What a call's body starts from before ``set`` and ``drop`` are applied."""

    CLIENT = "client"  # exactly the client's bytes
    PREFILL = "prefill"  # the host's prefill rewrite of them
    EMPTY = "empty"  # {}


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call, described.

    Args:
        method, path: the path is relative to the node's configured URL.
        base: see :class:`Base`; ignored for GET.
        set: top-level members to set; ``drop``: to remove. Nothing else of the body changes.
        headers: added to the host's; values must not come from the client unchecked.
        reply: see :class:`Reply`.
        origin: GET only: ``scheme://host:port`` to ask in place of the node's, without its credentials. Its host must
            be the node's, or the whole must be a value of the node's engine options.
    """

    method: Literal["GET", "POST"]
    path: str
    base: Base = Base.EMPTY
    set: Mapping[str, Any] = field(default_factory=dict)
    drop: frozenset[str] = frozenset()
    headers: Mapping[str, str] = field(default_factory=dict)
    reply: Reply = Reply.JSON
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A configured endpoint: what a client may know of a node or a prefill instance.

    Args:
        info: the last good answer to its probe, :meth:`EngineClient.details` included.
        config: the options of its engine.
        learned: what :meth:`EngineClient.learn` told of a prefill instance since it was last away.
        role: ``decode`` or ``prefill``.
    """

    name: str
    url: str
    info: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    learned: Mapping[str, Any] = field(default_factory=dict)
    role: str = "decode"


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What the prefill leg told, normalised by the host.

    Args:
        body: the parsed JSON answer.
        prompt_token_ids: empty if it did not say.
        first_token: None if it did not say.
    """

    body: Mapping[str, Any]
    prompt_token_ids: tuple[int, ...] = ()
    first_token: int | None = None
    first_logprob: TokenLogprob | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Leg:
    """Everything a client may use to describe a call for one attempt of one request.

    Args:
        transfer_id: minted by the host, fresh for every attempt, unguessable; the only key.
        request: the policy's view. ``sampling`` is resolved once for both legs.
        body: the client's parsed body, read-only.
        max_total_tokens: prompt estimate plus capped output.
        budget_s: seconds left for this attempt's hand-over.
        claim: the answer of the claim call; prefill: the answer of the prefill leg (both None before).
    """

    transfer_id: str
    request_id: str
    request: RequestView
    body: Mapping[str, Any]
    sampling: Sampling
    decode: Target
    prefill: Target | None
    max_total_tokens: int
    budget_s: float
    claim: Mapping[str, Any] | None = None
    result: PrefillResult | None = None


class FrameParser(ABC):
    """Turns the bytes of one token stream into items, whatever the chunking."""

    @abstractmethod
    def feed(self, data: bytes) -> Sequence[TokenChunk | Finished]:
        """Items completed by ``data``. Raises a RequestError that the stream carries; EngineFailed if the
        bytes are no frames."""

    @abstractmethod
    def eof(self) -> None:
        """The stream ended. Raises EngineFailed unless a :class:`Finished` was seen."""

    def stats(self) -> Mapping[str, float]:
        """Numbers that the stream told about its hand-over, so far: ``handoff_ms``, ``wait_ms``, ``kv_bytes``."""
        return {}


class EngineClient(ABC):
    """One a pool. Stateless but for what it is given: every method is pure and fast."""

    order: LegOrder = LegOrder.PREFILL_FIRST
    bind: Bind = Bind.EARLY
    #: seconds that a finished prefill's KV waits for a decode call; None = no limit known
    lease_s: float | None = None
    #: how KV that nobody fetches becomes free
    freed: Freed = Freed.CLOSE
    #: both legs at once: a decode node that was cut off keeps memory until prefill has written there, so the host makes
    #: a prefill call that was cut off again
    freed_by_write: bool = False
    #: seconds after which a decode node lets go by itself of KV for requests that are gone; and where the prefill
    #: instance that was to write it is gone as well. 0 = at once, or never
    lets_go_s: float = 0.0
    lets_go_lost_s: float = 0.0
    #: the decode leg answers with tokens (:attr:`Reply.TOKENS`), so the host needs the model's tokenizer
    speaks_tokens: bool = False
    #: hand-overs that one prefill instance bears at once, from its prefill call to the status of the decode call; the
    #: host makes further ones wait. None = any number
    handovers: int | None = None
    #: seconds for which a hand-over that was broken off still counts as one: its prefill instance may go on with it
    settle_s: float = 0.0
    #: seconds without requests for a node that stopped answering in the middle of one
    fence_s: float = 0.0

    @abstractmethod
    def probe(self, node: Target) -> Call:
        """A cheap GET that answers 200 when the node can serve; asked at start and every few seconds."""

    def details(self, node: Target) -> Mapping[str, Call]:
        """More to ask with every probe; ``info[name]`` is the answer. One that fails fails the probe."""
        return {}

    @abstractmethod
    def capabilities(self, info: Mapping[str, Any]) -> Capabilities:
        """Capabilities from the last probe's answer. Called when it changes.

        Raises EngineFailed if the answer says that the node cannot serve (yet).
        """

    def accepts(self, info: Mapping[str, Any]) -> frozenset[str]:
        """Fingerprints of KV layouts that the node takes; empty = the host compares nothing."""
        return frozenset()

    def writes(self, instance: Target) -> frozenset[str]:
        """Asked of a prefill instance's engine: what it hands over, as other clients' :meth:`accepts` name it; empty =
        the host compares nothing."""
        return frozenset()

    def order_of(self, leg: Leg) -> LegOrder:
        """The order for one attempt, where it depends on what is known of the instance. Never ``DECODE_ONLY`` unless
        :attr:`order` is."""
        return self.order

    def learn(self, leg: Leg) -> Mapping[str, Any]:
        """After the prefill leg: what to remember of the instance for later attempts (``leg.prefill.learned``), by
        name. Forgotten as soon as a probe of it fails or a hand-over from it does."""
        return {}

    def claim(self, leg: Leg) -> Call | None:
        """Reserve a landing, before prefill. None: this engine needs no claim."""
        return None

    @abstractmethod
    def prefill(self, leg: Leg) -> Call | None:
        """The prefill leg; None if ``order`` is decode_only. Raises, before anything is spent: InvalidRequest for what
        this engine cannot hand over, Unsupported if another one may, AdmissionRejected if ``leg.claim`` says busy."""

    @abstractmethod
    def decode(self, leg: Leg) -> Call:
        """The decode leg; ``leg.result`` is None if both run at once. Raises TransferFailed if prefill handed over
        nothing usable. A ``prompt_logprobs`` that is dropped here is taken from prefill's answer by the host."""

    def cancel(self, leg: Leg) -> Call | None:
        """Free whatever the node holds for this attempt; idempotent, sent on every path that ends early
        after a claim. None: closing the connection is enough."""
        return None

    def alone(self, leg: Leg) -> Call | None:
        """The whole request answered by ``leg.decode`` (a node or a prefill instance) without any hand-over, as one
        JSON document, and without what its cache may have from one. The host compares a short greedy answer over both
        legs with it before it uses a pair. None: it cannot be compared."""
        return None

    def load(self, node: Target) -> Call | None:
        """A cheap GET for the node's load; None = it cannot say."""
        return None

    def parse_load(self, info: Mapping[str, Any]) -> EngineLoad:
        """Reading of :meth:`load`'s answer: its JSON object, or ``{"text": …}`` for a reply of text."""
        return EngineLoad()

    def told_load(self, headers: Mapping[str, str]) -> EngineLoad | None:
        """Load that an answer's headers (lower case) tell besides; None = nothing. What is None in it stays as it was
        told last."""
        return None

    def cache_feeds(self, node: Target) -> Sequence[CacheFeed]:
        """Sources of what the endpoint's prefix cache holds, one a cache behind its address; opened at start. Empty =
        it is not told, and affinity goes by what was sent there."""
        return ()

    def frames(self) -> FrameParser:
        """A new parser for a ``tokens`` reply. Only called if ``decode`` says so."""
        raise NotImplementedError(f"{type(self).__name__} declares no token stream")

    def frames_of(self, leg: Leg) -> FrameParser:
        """As :meth:`frames`, for streams that can only be read with what prefill told. This is what the host calls."""
        return self.frames()

    def refused(self, status: int, body: Mapping[str, Any]) -> RequestError | None:
        """What a decode node means by a JSON answer with another status than 200; None = what the host makes of it."""
        return None
