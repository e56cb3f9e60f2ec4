"""The ``policy`` section's service classes and tenants → :class:`~pdhub.core.slo_classes.Classes`."""

from __future__ import annotations

from pdhub.api.errors import ConfigError
from pdhub.config.explain import nearest
from pdhub.config.origin import Origins, Path
from pdhub.config.policy_models import PolicyConfig, SLOClass, TenantConfig
from pdhub.core.slo import TIER_PRIORITY
from pdhub.core.slo_classes import PRESETS, Classes, ServiceClass, Tenant, Trust


def build_classes(policy: PolicyConfig, origins: Origins) -> Classes:
    """Presets filled in, names and API keys checked. Raises ConfigError."""
    classes = {name: _class(name, config) for name, config in policy.slo_classes.items()}

    def find(name: str | None, path: Path) -> ServiceClass | None:
        if name is None or name in classes:
            return classes.get(name or "")
        near = nearest(name, list(classes))
        hint = f"did you mean '{near}'?" if near else "define it under policy.slo_classes"
        raise ConfigError(f"there is no service class '{name}'", where=origins.where(path), hint=hint)

    _one_class_a_tier(policy, origins)
    tenants = {}
    for name, config in policy.tenants.items():
        path: Path = ("policy", "tenants", name)
        tenants[name] = Tenant(
            name=name,
            trust=_trust(config),
            best=find(config.max_class, (*path, "max_class")),
            default=find(config.default_class, (*path, "default_class")),
            proven=bool(config.api_key_sha256),
        )
    return Classes(
        classes=classes,
        default=find(policy.default_class, ("policy", "default_class")),
        tenants=tenants,
        keys=_keys(policy, origins),
        default_tenant=policy.default_tenant,
        strict=policy.strict,
    )


def _class(name: str, config: SLOClass) -> ServiceClass:
    ttft, tpot = PRESETS[config.preset] if config.preset is not None else (None, None)
    priority = TIER_PRIORITY.get(config.service_tier or "", 0) if config.priority is None else config.priority
    return ServiceClass(
        name=name,
        ttft_ms=ttft if config.ttft_ms is None else config.ttft_ms,
        tpot_ms=tpot if config.tpot_ms is None else config.tpot_ms,
        priority=priority,
        tier=config.service_tier,
    )


def _trust(config: TenantConfig) -> Trust:
    if config.trust is not None:
        return Trust(config.trust)
    return Trust.CLAMP if config.max_class is not None else Trust.FULL


def _one_class_a_tier(policy: PolicyConfig, origins: Origins) -> None:
    seen: dict[str, str] = {}
    for name, config in policy.slo_classes.items():
        tier = config.service_tier
        if tier is not None and tier in seen:
            where = origins.where(("policy", "slo_classes", name, "service_tier"))
            hint = f"'{seen[tier]}' has it already"
            raise ConfigError(f"two service classes are service_tier '{tier}'", where=where, hint=hint)
        if tier is not None:
            seen[tier] = name


def _keys(policy: PolicyConfig, origins: Origins) -> dict[str, str]:
    keys: dict[str, str] = {}
    for name, config in policy.tenants.items():
        for i, digest in enumerate(config.api_key_sha256):
            if digest in keys:
                where = origins.where(("policy", "tenants", name, "api_key_sha256", i))
                raise ConfigError(
                    "an API key names two tenants", where=where, hint=f"the other is tenant '{keys[digest]}'"
                )
            keys[digest] = name
    return keys
