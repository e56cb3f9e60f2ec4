"""The embedded prefill contract: an engine that computes a prompt's KV in a process hosted by ``pdhub node``.

The host speaks the HTTP subset of vLLM's prefill leg, joins landings and sends; the engine tokenises and
computes. A vLLM prefill needs none of this: there pdhub's connector runs inside vLLM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdhub.api.engine import Capabilities, TokenLogprob
from pdhub.api.layout import KVLayout
from pdhub.api.request import Sampling
from pdhub.api.transport import Region


@dataclass(frozen=True, slots=True)
class PrefillInfo:
    """What :meth:`PrefillEngine.start` returns.

    Args:
        layout: of the KV that it writes.
        capabilities: what the first token's sampling can do; ``max_context`` is the model's.
        chunk_tokens: tokens a forward pass computes at most; a chunk's KV leaves when it is computed.
        sampling_defaults: from the model's generation config; members as in :class:`Sampling`.
        eos_token_ids: ids that end a sequence.
    """

    layout: KVLayout
    capabilities: Capabilities
    chunk_tokens: int
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """One prompt. ``transfer_id`` is the key, as in the claim.

    ``first_mask_ids`` are ids that must not be sampled first (EOS and stop ids while ``min_tokens`` > 0).
    """

    transfer_id: str
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling = Sampling()
    logprobs: int | None = None
    first_mask_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KVChunk:
    """KV of the tokens ``start`` to ``stop`` (exclusive), ready to be copied out.

    ``start`` is a multiple of every group's block size; ``stop`` is too, but for the last chunk.

    Args:
        nbytes: one shard's bytes: for each group the blocks ``start // block_tokens`` to
            ``ceil(stop / block_tokens)``, in the layout's order. The tail of a partly filled block is zero.
        write_into: copy them to the start of a region (at least ``nbytes`` long). Called once, from a
            thread, before the next item is asked for.
    """

    start: int
    stop: int
    nbytes: int
    write_into: Callable[[Region], None]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The sampled token: the last item of a prefill, exactly once."""

    token_id: int
    logprob: TokenLogprob | None = None


class PrefillEngine(ABC):
    """One embedded prefill instance. Methods run on the host's loop; computing goes to threads.

    ``tokenize`` and ``decode_text`` alone run in one other thread, one call at a time, so that a long prompt does not
    hold the loop.
    """

    @abstractmethod
    async def start(self) -> PrefillInfo:
        """Once, first. Raises as :meth:`pdhub.api.engine.DecodeEngine.start`."""

    @abstractmethod
    def tokenize(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        """Token ids of an OpenAI body: ``messages`` (chat template applied, ``tools`` and
        ``chat_template_kwargs`` honoured) or ``prompt`` (text or ids).

        Raises InvalidRequest for what cannot be rendered, such as ``add_generation_prompt``,
        ``continue_final_message``, ``documents`` or ``chat_template`` if the engine does not honour them.
        """

    @abstractmethod
    def decode_text(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens skipped; for the one-token answer of the prefill leg."""

    @abstractmethod
    def prefill(self, request: PrefillRequest) -> AsyncIterator[KVChunk | FirstToken]:
        """Compute in chunks; yield each chunk's KV as soon as it is computed, then the first token.

        Closing the iterator stops the work at the next chunk. Several may be open at once: while a node does not
        take a request's KV, the host asks another request's iterator for its next item. It never asks two at once.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release everything. Idempotent."""
