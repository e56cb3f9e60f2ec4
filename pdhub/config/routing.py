"""The ``policy`` section → :class:`~pdhub.policies.routing.Routing`: plugins found, options and names checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zoneinfo import ZoneInfo

from pydantic import ValidationError

from pdhub.api.errors import ConfigError, PluginError
from pdhub.api.plugin import PolicyPart
from pdhub.config.base import Component
from pdhub.config.explain import explain, nearest
from pdhub.config.models import Config
from pdhub.config.origin import Origins, Path
from pdhub.config.policy_models import (
    FilterConfig,
    MatchConfig,
    PolicyConfig,
    RangeConfig,
    RoutingConfig,
    Rule,
    ScorerConfig,
    WindowConfig,
)
from pdhub.policies import match
from pdhub.policies import routing as plain
from pdhub.registry import Registry

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def build_routing(config: Config, registry: Registry, origins: Origins) -> plain.Routing:
    """Everything that ``policy:`` says about where requests go.

    Raises:
        ConfigError: options or names that are wrong, with where. PluginError: a missing plugin.
    """
    return _Builder([pool.name for pool in config.pools], registry, origins).routing(config.policy, ("policy",))


class _Builder:
    def __init__(self, pools: Sequence[str], registry: Registry, origins: Origins) -> None:
        self._pools = pools
        self._registry = registry
        self._origins = origins

    def routing(self, config: RoutingConfig, path: Path) -> plain.Routing:
        names: set[str] = set()
        for i, rule in enumerate(config.rules):
            if rule.name in names:
                where = self._origins.where((*path, "rules", i, "name"))
                raise ConfigError(f"two rules are named '{rule.name}'", where=where, hint="rename one")
            names.add(rule.name)
        self._known(config.fallback, (*path, "fallback"))
        shadow = config.shadow if isinstance(config, PolicyConfig) else None
        prefill = config.prefill if isinstance(config, PolicyConfig) else None
        return plain.Routing(
            base=self._part(config, PolicyPart.POLICY, path),
            filters=self._filters(config.filters, (*path, "filters")),
            scorers=self._scorers(config.scorers, (*path, "scorers")),
            rules=tuple(self._rule(rule, (*path, "rules", i)) for i, rule in enumerate(config.rules)),
            fallback=tuple(config.fallback),
            shadow=self.routing(shadow, (*path, "shadow")) if shadow is not None else None,
            prefill=self._part(prefill, PolicyPart.POLICY, (*path, "prefill")) if prefill is not None else None,
        )

    def _rule(self, rule: Rule, path: Path) -> plain.Rule:
        self._known(rule.pools, (*path, "pools"))
        self._known(rule.fallback or (), (*path, "fallback"))
        for pool in rule.weights:
            self._pool(pool, (*path, "weights", pool))
        return plain.Rule(
            name=rule.name,
            match=_match(rule.match),
            pools=tuple(rule.pools),
            weights=tuple(sorted(rule.weights.items())),
            sticky=rule.sticky,
            filters=self._filters(rule.filters, (*path, "filters")),
            scorers=self._scorers(rule.scorers, (*path, "scorers")),
            fallback=None if rule.fallback is None else tuple(rule.fallback),
        )

    def _filters(self, filters: Sequence[FilterConfig], path: Path) -> tuple[plain.Part, ...]:
        return tuple(self._part(f, PolicyPart.FILTER, (*path, i), soft=f.soft) for i, f in enumerate(filters))

    def _scorers(self, scorers: Sequence[ScorerConfig], path: Path) -> tuple[plain.Part, ...]:
        parts = [self._part(s, PolicyPart.SCORER, (*path, i), weight=s.weight) for i, s in enumerate(scorers)]
        for i, part in enumerate(parts):
            if part.name in [other.name for other in parts[:i]]:
                where = self._origins.where((*path, i))
                raise ConfigError(f"two scorers are named '{part.name}'", where=where, hint="give one a `name:`")
        return tuple(parts)

    def _part(
        self, component: Component, kind: PolicyPart, path: Path, *, weight: float = 1.0, soft: bool = False
    ) -> plain.Part:
        try:
            spec = self._registry.policy(component.type, kind)
        except PluginError as error:
            raise PluginError(f"{self._origins.where((*path, 'type'))}: {error.message}", hint=error.hint) from error
        try:
            options = spec.config.model_validate(component.config)
        except ValidationError as error:
            raise explain(error, spec.config, (*path, "config"), self._origins) from None
        self._check(getattr(options, "check", None), (*path, "config"))
        return plain.Part(component.name or spec.name, spec, options, weight, soft)

    def _check(self, check: object, path: Path) -> None:
        """A plugin's options may refer to pools: their model checks that with an optional ``check(pools)``."""
        if not callable(check):
            return
        try:
            check(list(self._pools))
        except ConfigError:
            raise
        except ValueError as error:
            hint = f"the pools are: {', '.join(self._pools)}"
            raise ConfigError(str(error), where=self._origins.where(path), hint=hint) from None

    def _known(self, pools: Iterable[str], path: Path) -> None:
        for i, pool in enumerate(pools):
            self._pool(pool, (*path, i))

    def _pool(self, pool: str, path: Path) -> None:
        if pool not in self._pools:
            near = nearest(pool, self._pools)
            hint = f"did you mean '{near}'?" if near else f"the pools are: {', '.join(self._pools)}"
            raise ConfigError(f"there is no pool '{pool}'", where=self._origins.where(path), hint=hint)


def _match(config: MatchConfig) -> match.Match:
    return match.Match(
        models=tuple(config.model),
        endpoints=tuple(config.endpoint),
        tenants=tuple(config.tenant),
        slo_classes=tuple(config.slo_class),
        headers=dict(config.headers),
        stream=config.stream,
        has_slo=config.has_slo,
        ttft_ms=_range(config.ttft_ms),
        tpot_ms=_range(config.tpot_ms),
        prompt_tokens=_range(config.prompt_tokens),
        max_tokens=_range(config.max_tokens),
        priority=_range(config.priority),
        features=frozenset(config.features),
        without=frozenset(config.without),
        windows=tuple(_window(window) for window in config.time),
    )


def _range(config: RangeConfig | None) -> match.Range | None:
    return None if config is None else match.Range(config.at_least, config.below)


def _window(config: WindowConfig) -> match.Window:
    start, end = config.bounds()
    days = frozenset(_DAYS.index(day) for day in config.days) or frozenset(range(7))
    return match.Window(days, start, end, ZoneInfo(config.zone))
