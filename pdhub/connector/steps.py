"""What the scheduler's side tells the workers with every engine step. Plain values: they are pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdhub.wire.http import HandoffParams

Table = tuple[tuple[int, ...], ...]
"""Block ids, one list for each of vLLM's KV cache groups."""


@dataclass(frozen=True, slots=True)
class Start:
    """A request of ours arrived: join its landing. ``tokens``: length of its prompt."""

    req_id: str
    params: HandoffParams
    tokens: int


@dataclass(frozen=True, slots=True)
class Advance:
    """A request of ours is part of this step.

    Args:
        blocks: further blocks, or the whole table if ``fresh``.
        before, computed: prompt tokens whose KV is in the cache before this step, and after it.
    """

    req_id: str
    blocks: Table
    fresh: bool
    before: int
    computed: int


@dataclass(frozen=True, slots=True)
class End:
    """vLLM is through with a request.

    Args:
        held: its blocks stay until every worker has reported it.
        complete: the whole prompt was computed; else nobody wants the rest.
    """

    req_id: str
    held: bool
    complete: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step, in the order in which a worker must apply it."""

    preempted: tuple[str, ...] = ()
    ends: tuple[End, ...] = ()
    starts: tuple[Start, ...] = ()
    advances: tuple[Advance, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a hand-over failed. ``need``: tokens that its landing must hold, where that was the reason."""

    code: str
    message: str
    need: int = 0


@dataclass(slots=True)
class Report:
    """What a worker tells the scheduler's side: hand-overs that failed since the last step."""

    failures: dict[str, Failure] = field(default_factory=dict)

    def merged(self, other: Report) -> Report:
        """Of two workers; the first reason stays."""
        return Report({**other.failures, **self.failures})
