"""The routing part of a policy as plain data: found, validated, not yet made. The configuration builds it,
:func:`pdhub.policies.compose.compose` makes a policy of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from pydantic import BaseModel

from pdhub.api.plugin import PolicySpec
from pdhub.policies.match import Match


@dataclass(frozen=True, slots=True)
class Part:
    """One plugin in use.

    Args:
        name: what decisions call it.
        weight: of a scorer.
        soft: of a filter: ignored for a request that it would leave without any node.
    """

    name: str
    spec: PolicySpec
    config: BaseModel
    weight: float = 1.0
    soft: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to the requests that ``match``.

    Args:
        pools: in order; empty = all, in no order.
        weights: instead of ``pools``: each request draws one of them, the others follow by weight.
        sticky: what a draw goes by: ``request``, ``session`` or ``tenant``.
        filters: beside the policy's own. scorers: rank the nodes of all ``pools`` together.
        fallback: pools behind those; None = all others, empty = nobody.
    """

    name: str
    match: Match = field(default_factory=Match)
    pools: tuple[str, ...] = ()
    weights: tuple[tuple[str, float], ...] = ()
    sticky: str = "request"
    filters: tuple[Part, ...] = ()
    scorers: tuple[Part, ...] = ()
    fallback: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Routing:
    """Args:
    base: the policy that ``type`` names.
    filters: drop nodes before anybody chooses. scorers: rank the nodes within each pool.
    rules: the first that matches counts.
    fallback: pools held in reserve: they follow behind all others, in this order.
    shadow: asked for each request as well; its decisions are only logged.
    prefill: chooses the prefill instance; None in a shadow.
    """

    base: Part
    filters: tuple[Part, ...] = ()
    scorers: tuple[Part, ...] = ()
    rules: tuple[Rule, ...] = ()
    fallback: tuple[str, ...] = ()
    shadow: Routing | None = None
    prefill: Part | None = None

    @cached_property
    def headers(self) -> frozenset[str]:
        """Names of the request headers that rules look at, the shadow's included."""
        own = frozenset(name for rule in self.rules for name in rule.match.headers)
        return own | (self.shadow.headers if self.shadow is not None else frozenset())

    def parts(self) -> Iterator[Part]:
        """Every plugin of this policy, without the shadow's."""
        yield self.base
        yield from self.filters
        yield from self.scorers
        for rule in self.rules:
            yield from rule.filters
            yield from rule.scorers
