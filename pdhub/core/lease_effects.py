"""What a lease table asks its host to do. Nothing else happens: the table touches no memory and no socket."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from pdhub.api.errors import RequestError

L = TypeVar("L")
"""Whatever the host calls a landing."""


class Refusal(StrEnum):
    """Why a writer may not join; the texts are those of :class:`pdhub.wire.control.RefusedCode`."""

    UNKNOWN = "unknown_transfer"
    STALE = "stale_generation"
    TOO_SMALL = "landing_too_small"
    CONTEXT = "context_length_exceeded"
    LAYOUT = "layout_mismatch"
    FAILED = "transfer_failed"


@dataclass(frozen=True, slots=True)
class Grant(Generic[L]):
    """Give ``owner`` the right to write shard ``rank``, then send the accept."""

    owner: str
    transfer_id: str
    generation: int
    rank: int
    landing: L


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell ``owner`` no. ``need``: tokens that would have been enough."""

    owner: str
    transfer_id: str
    code: Refusal
    message: str
    need: int = 0


@dataclass(frozen=True, slots=True)
class Revoke:
    """Ask ``owner`` to stop writing shard ``rank`` and to leave."""

    owner: str
    transfer_id: str
    generation: int
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fence(Generic[L]):
    """Take every right to write into the landing back; answer with ``LeaseTable.fenced``, exactly once."""

    transfer_id: str
    generation: int
    landing: L


@dataclass(frozen=True, slots=True)
class Ready:
    """Every byte is there: whoever waits to decode may ask for a slot."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class StopDecode:
    """End the stream; answer with ``LeaseTable.finish`` once it ended."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The lease failed: whoever waits for it gets ``error``."""

    transfer_id: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class Release(Generic[L]):
    """No byte can land any more and nobody reads: free the landing. Exactly once a lease."""

    transfer_id: str
    generation: int
    landing: L


@dataclass(frozen=True, slots=True)
class Restart:
    """It cannot be proven that a lost writer stopped: drain this process and start a new one."""

    reason: str


Effect = Grant[L] | Refuse | Revoke | Fence[L] | Ready | StopDecode | Ended | Release[L] | Restart
