"""Which processes a configuration asks for, and in which order."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from pdhub.api import ConfigError, NodeSpec, Process, Topology
from pdhub.config.build import Plan, needs_prefill
from pdhub.config.topology import operate_of, reachable, specs, topology
from pdhub.operate.member import Member

__all__ = ["ROUTER", "process", "reachable", "router_url", "stages", "topology"]

ROUTER = "router"
_AFTER_DRAIN_S = 5.0
"""A drained node still closes its engine and its regions."""


def stages(plan: Plan, overrides: Sequence[str] = ()) -> tuple[list[Member], list[Member]]:
    """Members to start: the nodes with ``launch: true`` (prefill instances first), then the router.

    Args:
        plan: a validated configuration that came from a file.
        overrides: ``a.b=value`` words that the children must get too.
    """
    if plan.path is None:
        raise ConfigError("a tree can only be started from a configuration file")
    words = _words(overrides)
    whole = topology(plan)
    nodes = [
        Member(node.name, process(plan, whole, node.name, overrides), stop_within_s=node.drain_s + _AFTER_DRAIN_S)
        for _, node in specs(plan)
        if node.launch
    ]
    router = Process(
        argv=(sys.executable, "-m", "pdhub", "router", str(plan.path), *words, *_words(_restartable(plan))),
        ready_url=f"{router_url(plan)}/ready",
        ready_within_s=60.0,
    )
    return nodes, [Member(ROUTER, router, vital=True)]


def process(plan: Plan, whole: Topology, name: str, overrides: Sequence[str] = ()) -> Process:
    """How one node is started: as its engine says, else by ``pdhub node``.

    Args:
        whole: the plan's topology. overrides: ``a.b=value`` words that the process must get too.

    Raises:
        ConfigError: there is no such node, or its engine cannot start it.
    """
    spec = whole.node(name)
    if spec is None:
        hint = f"there are: {', '.join(node.name for node in whole.nodes)}"
        raise ConfigError(f"no node or prefill instance is named '{name}'", hint=hint)
    operate = operate_of(plan, spec)
    own = None if operate is None else operate.process(spec, whole)
    return own or _hosted(plan, spec, overrides)


def _hosted(plan: Plan, spec: NodeSpec, overrides: Sequence[str]) -> Process:
    """An engine with options `python` and `ready_within_s` says with them where its nodes start, and how long."""
    python = spec.config.get("python") or sys.executable
    argv = (python, "-m", "pdhub", "node", str(plan.path), spec.name, *_words(overrides))
    process = Process(argv=argv, ready_url=f"{spec.url}/health")
    within_s = spec.config.get("ready_within_s")
    return process if within_s is None else replace(process, ready_within_s=within_s)


def _words(overrides: Sequence[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def _restartable(plan: Plan) -> list[str]:
    """For the router: which nodes are started again when it says so. Those of `pdhub node` free their memory."""
    ours = [
        node.name
        for pool in plan.config.pools
        if (engine := plan.pools[pool.name]).spec.client is not None and needs_prefill(engine)
        for node in pool.nodes
        if node.launch
    ]
    named = plan.config.router.recycle.nodes
    return [f"router.recycle.nodes={json.dumps(sorted({*ours, *named}))}"] if ours else []


def router_url(plan: Plan) -> str:
    """Where clients on this machine reach the endpoint."""
    return reachable(plan.config.router.host, plan.config.router.port)
