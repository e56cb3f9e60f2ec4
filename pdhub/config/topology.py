"""A plan as engine plugins may see it: their nodes, and what one instance needs because of another."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pdhub.api.operate import NodeSpec, Operate, Topology
from pdhub.config.models import NodeConfig
from pdhub.config.settings import secret

if TYPE_CHECKING:
    from pdhub.config.build import Plan

BLOCK_TOKENS: Final = 16
"""Of KV on the wire, for engines that have no option of this name."""

EXTRA: Final = "kv_connector_extra_config"


def reachable(host: str, port: int, scheme: str = "http") -> str:
    """The URL at which this machine reaches a listener, also one that listens on every address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{scheme}://{host}:{port}"
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def specs(plan: Plan, *, secrets: bool = False) -> Iterator[tuple[NodeSpec, NodeConfig]]:
    """Every process of the configuration, prefill instances first.

    Args:
        secrets: with API keys, for those who make calls. Raises ConfigError for one that is not set.
    """
    for prefill in plan.config.prefill:
        serves = tuple(served(plan, prefill.name))
        spec = _spec(prefill, "prefill", None, prefill.engine.type, plan.prefill[prefill.name].config, secrets)
        yield replace(spec, serves=serves), prefill
    for pool in plan.config.pools:
        for node in pool.nodes:
            yield _spec(node, "decode", pool.name, pool.engine.type, plan.pools[pool.name].config, secrets), node


def topology(plan: Plan, *, secrets: bool = False) -> Topology:
    """The configuration as engine plugins may see it, with every prefill instance's children. Raises as
    :func:`specs`."""
    bare = Topology(
        model=plan.config.model.name,
        model_path=plan.config.model.path,
        nodes=tuple(spec for spec, _ in specs(plan, secrets=secrets)),
        transport=plan.config.handoff.transport.type,
        config_path=str(plan.path) if plan.path else None,
    )
    nodes = tuple(replace(n, children=_children(plan, n, bare)) if n.role == "prefill" else n for n in bare.nodes)
    return replace(bare, nodes=nodes)


def served(plan: Plan, prefill: str) -> Iterator[str]:
    """Names of the pools that a prefill instance computes prompts for."""
    from pdhub.config.build import needs_prefill

    named = next(p.pools for p in plan.config.prefill if p.name == prefill)
    for pool in plan.config.pools:
        if pool.name in named or (not named and needs_prefill(plan.pools[pool.name])):
            yield pool.name


def operate_of(plan: Plan, node: NodeSpec) -> Operate | None:
    """The deployment side of a node's engine; None if it has none."""
    engine = plan.prefill[node.name] if node.pool is None else plan.pools[node.pool]
    return None if engine.spec.operate is None else engine.spec.operate(engine.config)


def _children(plan: Plan, prefill: NodeSpec, bare: Topology) -> tuple[Mapping[str, Any], ...]:
    found: list[Mapping[str, Any]] = []
    for node in bare.nodes:
        if node.pool is None or node.pool not in prefill.serves:
            continue
        child = _child(plan, node, node.pool, bare)
        if child is not None and child not in found:
            found.append(child)
    return tuple(found)


def _child(plan: Plan, node: NodeSpec, pool: str, bare: Topology) -> Mapping[str, Any] | None:
    operate = operate_of(plan, node)
    child = operate.prefill_child(node, bare) if operate is not None else None
    if plan.pools[pool].spec.client is None and (child is None or set(child) == {EXTRA}):
        return connector(plan, pool, (child or {}).get(EXTRA, {}))
    return child


def connector(plan: Plan, pool: str, options: Mapping[str, Any] = MappingProxyType({})) -> Mapping[str, Any]:
    """The child that a vLLM prefill instance needs for a pool of `pdhub node`: pdhub's own connector.

    Args:
        options: that the engine sets, such as the form in which it takes KV.
    """
    handoff = plan.config.handoff
    extra = {
        "transport": plan.transport.spec.name,
        "transport_config": plan.transport.config.model_dump(mode="json", exclude_unset=True),
        "block_tokens": getattr(plan.pools[pool].config, "block_tokens", BLOCK_TOKENS),
        "staging_bytes": handoff.staging_bytes,
        "verify": handoff.verify,
        "connect_timeout_s": plan.config.router.connect_timeout_s,
        **options,
    }
    return {
        "kv_connector": "PDHubConnector",
        "kv_connector_module_path": "pdhub.connector.vllm",
        "kv_role": "kv_producer",
        EXTRA: extra,
    }


def _spec(node: NodeConfig, role: str, pool: str | None, engine: str, config: Any, secrets: bool) -> NodeSpec:
    return NodeSpec(
        name=node.name,
        role=role,
        pool=pool,
        url=reachable(node.host, node.port, node.scheme),
        engine=engine,
        config=config.model_dump(),
        host=node.host,
        port=node.port,
        launch=node.launch,
        api_key_env=node.api_key_env,
        api_key=secret(node.api_key_env) if secrets else None,
        threads=node.threads,
    )
