"""The records of a lease table: one lease, its writers, its terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic

from pdhub.api.errors import RequestError
from pdhub.core.lease_effects import L


class LeaseState(StrEnum):
    """CLAIMED → WRITING → READY → DECODING → RELEASED; any → QUARANTINED → RELEASED."""

    CLAIMED = "claimed"
    WRITING = "writing"
    READY = "ready"
    DECODING = "decoding"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class WriterPhase(StrEnum):
    """``WRITING`` writers may still change memory; the others have said, or it was proven, that they do not."""

    WRITING = "writing"
    DONE = "done"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Limits in seconds.

    Args:
        deadline_s: from the first join until every writer is done.
        ready_ttl_s: from READY until somebody asks to decode.
        revoke_s: how long a revoked writer may take to leave before its landing is fenced.
        fence_within_s: how long a fence may take before the node restarts.
    """

    deadline_s: float = 30.0
    ready_ttl_s: float = 30.0
    revoke_s: float = 0.5
    fence_within_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What was agreed at the claim.

    Args:
        capacity_tokens: prompt tokens that were asked for and promised.
        prompt_limit: most prompt tokens that leave room for the output in the node's context.
        writers: shards, each written by one writer.
    """

    capacity_tokens: int
    prompt_limit: int
    writers: int = 1


@dataclass(slots=True)
class Writer:
    """One shard's writer. ``owner`` is the connection that it joined over."""

    owner: str
    phase: WriterPhase = WriterPhase.WRITING
    nbytes: int = 0
    digest: str = ""


@dataclass(slots=True)
class Lease(Generic[L]):
    """One right to write into one landing. Owned by the table; hosts only read it."""

    transfer_id: str
    generation: int
    landing: L
    terms: Terms
    deadline: float | None
    state: LeaseState = LeaseState.CLAIMED
    writers: dict[int, Writer] = field(default_factory=dict)
    tokens: int = 0
    expected: bool = False
    stopping: bool = False
    fencing: bool = False
    error: RequestError | None = None
    joined_at: float = 0.0
    ready_at: float = 0.0

    @property
    def open_writers(self) -> list[tuple[int, Writer]]:
        """Those that may still change the landing."""
        return [(rank, w) for rank, w in sorted(self.writers.items()) if w.phase is WriterPhase.WRITING]

    @property
    def nbytes(self) -> int:
        """Bytes that the writers reported."""
        return sum(w.nbytes for w in self.writers.values())
