"""One request as policies, engine clients and observers see it. Everything is frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Feature(StrEnum):
    """What a request may ask of an engine beyond plain generation. Absent in capabilities means no."""

    SAMPLING = "sampling"
    TOP_K = "top_k"
    MIN_P = "min_p"
    PRESENCE_PENALTY = "presence_penalty"
    FREQUENCY_PENALTY = "frequency_penalty"
    REPETITION_PENALTY = "repetition_penalty"
    SEED = "seed"
    LOGIT_BIAS = "logit_bias"
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ECHO = "echo"
    IGNORE_EOS = "ignore_eos"
    MIN_TOKENS = "min_tokens"
    STOP_TOKEN_IDS = "stop_token_ids"
    N = "n"
    BEST_OF = "best_of"
    GRAMMAR = "grammar"
    TOOLS = "tools"
    REASONING = "reasoning"
    LORA = "lora"
    MULTIMODAL = "multimodal"
    #: members outside OpenAI's API that change the answer and have no feature of their own (vLLM's ``bad_words`` …)
    EXTENSIONS = "extensions"


@dataclass(frozen=True, slots=True)
class SLO:
    """Latency targets of one request in milliseconds; None = no target for that metric.

    Args:
        slo_class: the named class that gave targets or defaults, if one did.
        source: where the targets come from: ``header``, ``body``, ``class``, ``default`` or ``none``.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    slo_class: str | None = None
    source: str = "none"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling, resolved once (request over model defaults) and sent to both legs."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know. No prompt text: only its size, and a digest chain for affinity.

    Args:
        id: unique, minted by the router.
        model: as the client named it, after aliases.
        endpoint: ``/v1/chat/completions`` or ``/v1/completions``.
        prompt_tokens: estimate, never exact.
        max_tokens: the client's cap; None = the rest of the context.
        logprobs: alternatives a token that the client wants; None = none at all.
        features: what an engine must be able to do.
        sampling: resolved; engines may have limits for its values.
        slo: targets.
        stream: the client wants server-sent events.
        tenant: who asks; ``default-flow`` if unknown.
        priority: higher is more important, negative is sheddable (one polarity inside, whatever the header's).
        session: conversation that the client names; empty if none.
        headers: lower-cased names; only those that rules may match.
        prefix: digests of the prompt's prefixes, shortest first.
        seen_tokens: of the prompt's, how many begin a prompt that was sent before; a prefix cache may hold them.
            None = unknown.
        arrived_s: monotonic clock.
        wall_s: the same moment in seconds since the epoch, for rules with a time window; None = unknown.
        cached: of the prompt, the part (0 to 1) whose KV an endpoint's cache holds, by the endpoint's name; only
            endpoints whose engine tells it, and only if it is known for this prompt.
    """

    id: str
    model: str
    endpoint: str
    prompt_tokens: int
    max_tokens: int | None = None
    logprobs: int | None = None
    features: frozenset[Feature] = frozenset()
    slo: SLO = SLO()
    stream: bool = False
    tenant: str = "default-flow"
    priority: int = 0
    session: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[int, ...] = ()
    arrived_s: float = 0.0
    wall_s: float | None = None
    seen_tokens: int | None = None
    cached: Mapping[str, float] = field(default_factory=dict)
    sampling: Sampling = Sampling()


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """How a request ended; given to ``pdhub_request_finished`` observers and the decision log.

    Times are milliseconds since arrival; None = did not happen.

    Args:
        handoff_ms: the exposed hand-over: prefill answered to KV usable at the node, the wait for a slot left out.
        itl_p99_ms: the gap between two tokens that 99 of 100 do not exceed (at most 4.4 % too high); tokens that come
            in one piece have none between them.
        queued_ms: waited for a place in the pool. concurrency: requests on the node when this one started there.
        tier: the service tier that really served it.
        predicted_ttft_ms, predicted_tpot_ms: what the latency model said when the node was chosen.
        session, prefix: as in :class:`RequestView`; what affinity learns from. priority: as there.
        estimated: of ``prompt_tokens`` and ``completion_tokens``, those that nobody told. An answer that is relayed
            without usage counts a token for each event with text, which is too few where an engine sends several at
            once; its prompt is estimated from its bytes.
    """

    id: str
    model: str
    pool: str | None
    node: str | None
    prefill: str | None
    reason: str
    outcome: str
    error_code: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    total_ms: float = 0.0
    handoff_ms: float | None = None
    kv_bytes: int | None = None
    attempts: int = 1
    slo: SLO = SLO()
    queued_ms: float = 0.0
    concurrency: int | None = None
    tier: str | None = None
    predicted_ttft_ms: float | None = None
    predicted_tpot_ms: float | None = None
    session: str = ""
    prefix: tuple[int, ...] = ()
    priority: int = 0
    itl_p99_ms: float | None = None
    estimated: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
