"""A trace with service classes and tenants on top: what arrives at the simulated router."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdhub.api.request import SLO
from pdhub.simulate.traces import Item


@dataclass(frozen=True, slots=True)
class Class:
    """A service class in the mix.

    Args:
        share: relative weight. tenant: who sends all of it; None = the mix draws one for each request.
    """

    name: str
    share: float = 1.0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    priority: int = 0
    tenant: str | None = None

    def slo(self) -> SLO:
        given = self.ttft_ms is not None or self.tpot_ms is not None
        return SLO(self.ttft_ms, self.tpot_ms, self.name, "class" if given else "none")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Args:
        number: its place in the trace.
        luck: standard normal; how fast engines are with this one request.
        estimate: what the router believes ``prompt_tokens`` to be.
    """

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...]
    cls: Class
    luck: float
    estimate: int
    tenant: str

    @property
    def id(self) -> str:
        return f"r{self.number}"


@dataclass(frozen=True, slots=True)
class Mix:
    """Args:
    tenants: shares by name.
    estimate: standard deviation of the relative error of the router's estimate of prompt tokens.
    """

    classes: tuple[Class, ...]
    tenants: Mapping[str, float] = field(default_factory=lambda: {"default-flow": 1.0})
    estimate: float = 0.05


def arrivals(items: Sequence[Item], mix: Mix, *, speed: float = 1.0, seed: int = 0) -> list[Arrival]:
    """Args:
    speed: 2 = the trace runs twice as fast.
    seed: draws classes, tenants and luck; the same for every policy that is compared.
    """
    rng = random.Random(f"arrivals {seed}")
    shares = [c.share for c in mix.classes]
    tenants, weights = list(mix.tenants), list(mix.tenants.values())
    made = []
    for number, item in enumerate(items):
        cls = rng.choices(mix.classes, shares)[0]
        error = rng.gauss(0, mix.estimate)
        tenant = rng.choices(tenants, weights)[0]
        made.append(
            Arrival(
                number=number,
                at_s=item.at_s / speed,
                prompt_tokens=item.prompt_tokens,
                output_tokens=item.output_tokens,
                prefix=item.prefix,
                cls=cls,
                luck=rng.gauss(0, 1),
                estimate=max(1, round(item.prompt_tokens * (1 + max(-0.5, min(0.5, error))))),
                tenant=cls.tenant or tenant,
            )
        )
    return made
