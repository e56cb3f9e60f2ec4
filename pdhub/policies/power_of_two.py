"""``power_of_two``: of two nodes drawn by chance the emptier one."""

from __future__ import annotations

import random

from pdhub.api.plugin import NoConfig
from pdhub.api.policy import Candidate, Decision, Policy, Reason, Snapshot
from pdhub.api.request import RequestView
from pdhub.policies.candidates import Candidates
from pdhub.policies.capable import sift
from pdhub.policies.draw import mix, seed_of
from pdhub.policies.occupancy import fullness

NAME = "power_of_two"


class PowerOfTwo(Policy):
    """Nearly as even as the emptiest of all, and without the herd: routers with the same old picture draw
    different pairs. The rest follows by load, for retries."""

    def __init__(self, config: NoConfig) -> None:
        del config

    def choose(self, request: RequestView, snapshot: Snapshot, now: float, rng: random.Random) -> Decision:
        kept, dropped, nobody = sift(request, snapshot.pools)
        if not kept:
            return Decision((), Candidates(lambda: dropped), nobody, NAME)
        seed = seed_of(request.id)
        rows = [(fullness(p, n), mix(seed, n.name), p.name, n.name) for p, n in kept]
        # The two smallest of well-mixed numbers are a pair drawn by chance, whatever the order of the nodes.
        pair = {row[1:] for row in sorted(rows, key=lambda row: row[1:])[:2]}
        rows.sort(key=lambda row: (row[1:] not in pair, row))
        return Decision(
            order=tuple((pool, node) for _, _, pool, node in rows),
            candidates=Candidates(
                lambda: [
                    *(Candidate(r[2], r[3], scores={"load": r[0], "drawn": float(r[1:] in pair)}) for r in rows),
                    *dropped,
                ]
            ),
            reason=Reason.LEAST_LOADED,
            policy=NAME,
        )
