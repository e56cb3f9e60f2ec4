"""At which pool's door a request should wait, so that its targets are kept as long as any pool can keep them.

The policy's order stands; a request leaves it only where waiting is predicted to cost its TTFT target. Sans-IO: the
router and the lab ask the same question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdhub.api.request import SLO


@dataclass(frozen=True, slots=True)
class Door:
    """One pool as a request would find it now.

    Args:
        opens: it would let the request in or let it wait; false = it would refuse.
        ttft_ms: from now to the first token, waiting included; None = unknown. tpot_ms: per output token.
    """

    pool: str
    opens: bool = True
    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Way:
    """Args:
    pool: where to wait. in_time: nothing says that the first token would come too late.
    """

    pool: str
    in_time: bool


def choose_door(doors: Sequence[Door], slo: SLO, left_ms: float, held: str | None = None) -> Way:
    """The policy's first door while the first token comes in time there: how fast tokens follow was the policy's to
    weigh. Else the first that keeps both targets; else the first that keeps TTFT (late tokens are better than none);
    else the first that opens; else the first. What is unknown speaks against nobody.

    Args:
        doors: at least one, in the policy's order.
        left_ms: of the time in which the first token is due.
        held: a pool in which the request has a place: it stays while that keeps TTFT.
    """
    ordered = sorted(doors, key=lambda door: door.pool != held)

    def timely(door: Door) -> bool:
        return door.opens and (door.ttft_ms is None or door.ttft_ms <= left_ms)

    def attains(door: Door) -> bool:
        return timely(door) and (door.tpot_ms is None or slo.tpot_ms is None or door.tpot_ms <= slo.tpot_ms)

    if timely(ordered[0]):
        return Way(ordered[0].pool, True)
    for fits, in_time in ((attains, True), (timely, True), (lambda door: door.opens, False)):
        found = next((door for door in ordered if fits(door)), None)
        if found is not None:
            return Way(found.pool, in_time)
    return Way(ordered[0].pool, False)
