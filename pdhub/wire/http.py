"""HTTP messages between router, node and embedded prefill instance.

Node (decode)::

    POST /claim     ClaimBody   → ClaimReply | error
    POST /decode    DecodeBody  → NDJSON of Frame, one a line
    POST /cancel    CancelBody  → {}                       idempotent, any state
    GET  /health    → 200 {"status": "ok"} | 503 {"status": "draining"}
    GET  /capabilities → NodeInfo
    GET  /load      → LoadReply
    GET  /metrics   → Prometheus text

Prefill instance (the subset of vLLM's server that a prefill leg uses)::

    POST /v1/chat/completions, /v1/completions   max_tokens 1, return_token_ids, kv_transfer_params
    GET  /v1/models, /health, /metrics
    GET  /prefill   → PrefillInfoReply

Errors are OpenAI-shaped (:mod:`pdhub.wire.errors`). Unknown members are ignored, so that a newer peer may add some.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

HANDOFF_KEY: Final = "pdhub"
"""Member of ``kv_transfer_params`` that marks a request as ours; its value is :class:`HandoffParams`."""


class HandoffParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tells a sender where a request's KV goes. Written by the router only; refused from clients.

    ``host``, ``port``: the node's control channel. ``fingerprint``: the layout that was claimed.
    ``budget_s``: seconds from now in which the hand-over must end. ``min_tokens`` and ``stop_token_ids`` are the
    client's: with ``min_tokens`` the first token must be none that ends the sequence. ``capacity_tokens``,
    ``prompt_limit`` and ``context`` are the claim's, so that a sender which cannot wait for the node's answer to its
    join knows what that would be; 0 = unknown.
    """

    transfer_id: str
    generation: int
    host: str
    port: int
    fingerprint: str
    budget_s: float = 30.0
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    capacity_tokens: int = 0
    prompt_limit: int = 0
    context: int = 0


class ClaimBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """``tokens``: upper estimate of the prompt; ``max_tokens``: the client's cap on the output, 0 = rest of the
    context; ``ttl_s``: the claim expires if no writer joined by then. The node checks prompt + output against
    the context when a writer joins, because only the writer knows the exact prompt."""

    transfer_id: str
    request_id: str
    tokens: int
    max_tokens: int
    fingerprint: str
    ttl_s: float = 30.0


class ClaimReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """``prompt_limit``: tokens of prompt that leave room for the output, in whatever landing."""

    transfer_id: str
    generation: int
    host: str
    port: int
    capacity_tokens: int
    fingerprint: str
    prompt_limit: int = 0


class SamplingBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """As :class:`pdhub.api.request.Sampling`; ``logit_bias`` keys are ids as text, JSON has no other keys."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[str, float] = {}


LogprobEntry = tuple[int, float, list[tuple[int, float]]]
"""(token id, log probability, alternatives best first)"""


class DecodeBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """As :class:`pdhub.api.engine.DecodeRequest`. ``wait_s``: longest wait for READY and a slot together."""

    transfer_id: str
    generation: int
    request_id: str
    prompt_token_ids: list[int]
    first_token: int
    max_tokens: int
    sampling: SamplingBody = SamplingBody()
    first_logprob: LogprobEntry | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    wait_s: float = 30.0


class CancelBody(msgspec.Struct, frozen=True, omit_defaults=True):
    transfer_id: str
    reason: str = ""


class Started(msgspec.Struct, frozen=True, omit_defaults=True):
    """First frame: the slot is held.

    ``handoff_ms``: the exposed hand-over, from the decode call to KV that the engine can use, without the wait for a
    slot. ``wait_ms``: that wait. ``transfer_ms``: first writer's join to READY; most of it is prefill computing.
    """

    handoff_ms: float
    wait_ms: float
    kv_bytes: int
    transfer_ms: float = 0.0


class Done(msgspec.Struct, frozen=True, omit_defaults=True):
    reason: str
    n: int
    stop_token: int | None = None


class ErrorBody(msgspec.Struct, frozen=True, omit_defaults=True):
    message: str
    code: str
    type: str = "server_error"
    param: str | None = None


class Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a decode stream: exactly one of ``s`` (first), ``t`` (with ``lp``), ``done`` or ``error`` (last)."""

    s: Started | None = None
    t: list[int] | None = None
    lp: list[LogprobEntry] | None = None
    done: Done | None = None
    error: ErrorBody | None = None


class CapabilitiesBody(msgspec.Struct, frozen=True, omit_defaults=True):
    features: list[str] = []
    max_context: int = 0
    max_logprobs: int = 0
    slots: int = 1
    cancel_within_s: float = 1.0
    max_top_k: int | None = None
    logprobs_from: float = 0.0


class NodeInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """``accepts``: fingerprints of KV layouts, best first. ``control``: host and port for senders."""

    node: str
    version: str
    protocol: int
    engine: str
    model: str
    transport: str
    capabilities: CapabilitiesBody
    accepts: list[str]
    landings: int
    control: tuple[str, int]


class LoadReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """``landings_free`` and ``slots_free`` are the host's counters; the rest is the engine's, None = unknown."""

    landings_free: int
    slots_free: int
    leases: dict[str, int]
    quarantined: int = 0
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    remaining_tokens: int | None = None


class PrefillInfoReply(msgspec.Struct, frozen=True, omit_defaults=True):
    node: str
    version: str
    protocol: int
    engine: str
    model: str
    transport: str
    fingerprint: str
    max_model_len: int
    capabilities: CapabilitiesBody
    sampling_defaults: dict[str, float] = {}
    eos_token_ids: list[int] = []
    layout: dict[str, Any] = {}


def to_json(value: msgspec.Struct) -> bytes:
    """Compact JSON."""
    return msgspec.json.encode(value)
