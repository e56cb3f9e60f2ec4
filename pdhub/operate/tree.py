"""Which processes a configuration asks for, and in which order."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator, Sequence

from pdhub.api import ConfigError, NodeSpec, Process, Topology
from pdhub.config.build import Plan
from pdhub.config.models import NodeConfig
from pdhub.operate.member import Member

ROUTER = "router"
_AFTER_DRAIN_S = 5.0
"""A drained node still closes its engine and its regions."""


def reachable(host: str, port: int, scheme: str = "http") -> str:
    """The URL at which this machine reaches a listener, also one that listens on every address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{scheme}://{host}:{port}"
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _specs(plan: Plan) -> Iterator[tuple[NodeSpec, NodeConfig]]:
    def spec(node: NodeConfig, role: str, pool: str | None, engine: str, config: dict[str, object]) -> NodeSpec:
        return NodeSpec(
            name=node.name, role=role, pool=pool, url=reachable(node.host, node.port, node.scheme),
            engine=engine, config=config,
        )  # fmt: skip

    for prefill in plan.config.prefill:
        engine = prefill.engine
        yield spec(prefill, "prefill", None, engine.type, plan.prefill[prefill.name].config.model_dump()), prefill
    for pool in plan.config.pools:
        for node in pool.nodes:
            config = plan.pools[pool.name].config.model_dump()
            yield spec(node, "decode", pool.name, pool.engine.type, config), node


def topology(plan: Plan) -> Topology:
    """The configuration as engine plugins may see it."""
    return Topology(
        model=plan.config.model.name,
        model_path=plan.config.model.path,
        nodes=tuple(spec for spec, _ in _specs(plan)),
        transport=plan.config.handoff.transport.type,
        config_path=str(plan.path) if plan.path else None,
    )


def stages(plan: Plan, overrides: Sequence[str] = ()) -> tuple[list[Member], list[Member]]:
    """Members to start: the nodes with ``launch: true`` (prefill instances first), then the router.

    Args:
        plan: a validated configuration that came from a file.
        overrides: ``a.b=value`` words that the children must get too.
    """
    if plan.path is None:
        raise ConfigError("a tree can only be started from a configuration file")
    words = [word for override in overrides for word in ("--set", override)]
    whole = topology(plan)
    nodes: list[Member] = []
    for spec, node in _specs(plan):
        if not node.launch:
            continue
        resolved = plan.prefill[node.name] if spec.pool is None else plan.pools[spec.pool]
        process = None
        if resolved.spec.operate is not None:
            process = resolved.spec.operate(resolved.config).process(spec, whole)
        if process is None:
            argv = (sys.executable, "-m", "pdhub", "node", str(plan.path), node.name, *words)
            process = Process(argv=argv, ready_url=f"{spec.url}/health")
        nodes.append(Member(node.name, process, stop_within_s=node.drain_s + _AFTER_DRAIN_S))
    router = Process(
        argv=(sys.executable, "-m", "pdhub", "router", str(plan.path), *words),
        ready_url=f"{router_url(plan)}/ready",
        ready_within_s=60.0,
    )
    return nodes, [Member(ROUTER, router, vital=True)]


def router_url(plan: Plan) -> str:
    """Where clients on this machine reach the endpoint."""
    return reachable(plan.config.router.host, plan.config.router.port)
