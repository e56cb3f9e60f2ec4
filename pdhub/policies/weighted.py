"""``weighted``: a share of the traffic a pool, as for a canary."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from pdhub.api.plugin import PluginConfig
from pdhub.api.policy import Candidate, Decision, Policy, Reason, Snapshot
from pdhub.api.request import RequestView
from pdhub.policies.candidates import Candidates
from pdhub.policies.capable import sift
from pdhub.policies.draw import mix, seed_of, unit
from pdhub.policies.occupancy import fullness

NAME = "weighted"


class WeightedConfig(PluginConfig):
    """Options of ``weighted``."""

    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default_factory=dict, description="Weight by pool; a pool that is not named has 1, one with 0 is for fallback."
    )

    def check(self, pools: Sequence[str]) -> None:
        """Raises ValueError if a named pool does not exist."""
        for name in self.weights:
            if name not in pools:
                raise ValueError(f"weights names no pool: '{name}'")


class Weighted(Policy):
    """Pools in an order drawn by weight from the request's id; in a pool the emptiest node."""

    def __init__(self, config: WeightedConfig) -> None:
        self._config = config

    def choose(self, request: RequestView, snapshot: Snapshot, now: float, rng: random.Random) -> Decision:
        kept, dropped, nobody = sift(request, snapshot.pools)
        if not kept:
            return Decision((), Candidates(lambda: dropped), nobody, NAME)
        seed = seed_of(request.id)
        turn = {name: self._turn(seed, name) for name in {pool.name for pool, _ in kept}}
        kept.sort(key=lambda it: (turn[it[0].name], it[0].name, fullness(*it), mix(seed, it[1].name), it[1].name))
        fallback = math.isinf(turn[kept[0][0].name])
        return Decision(
            order=tuple((pool.name, node.name) for pool, node in kept),
            candidates=Candidates(
                lambda: [
                    *(Candidate(p.name, n.name, scores={"weight": self._weight(p.name)}) for p, n in kept),
                    *dropped,
                ]
            ),
            reason=Reason.FALLBACK if fallback else Reason.WEIGHT,
            policy=NAME,
        )

    def _weight(self, pool: str) -> float:
        return self._config.weights.get(pool, 1.0)

    def _turn(self, seed: int, pool: str) -> float:
        """The first of exponential clocks whose rates are the weights rings with their probability."""
        weight = self._weight(pool)
        return -math.log(unit(mix(seed, pool))) / weight if weight else math.inf
