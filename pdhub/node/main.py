"""``pdhub node CONFIG NAME``: one node or prefill instance in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from pdhub.api.errors import ConfigError
from pdhub.config.build import Plan, load_plan
from pdhub.node.decode import NodeServer
from pdhub.node.lifecycle import serve


def run(config_path: str, name: str, overrides: Sequence[str] = ()) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Blocks.

    Args:
        config_path: the YAML. name: of a node of any pool, or of a prefill instance.
        overrides: ``a.b.0.c=value`` of flags.

    Returns:
        The exit status: 0, or ``EXIT_RESTART`` if the process must be replaced.

    Raises:
        ConfigError, PluginError: it cannot start.
    """
    return _run_loop(_serve(load_plan(config_path, overrides=overrides), name))


async def _serve(plan: Plan, name: str) -> int:
    for pool in plan.config.pools:
        for node in pool.nodes:
            if node.name == name:
                server = NodeServer(plan, pool.name, node)
                return await serve(server, node.drain_s, server.restart_wanted)
    for prefill in plan.config.prefill:
        if prefill.name == name:
            from pdhub.node.prefill import PrefillServer

            return await serve(PrefillServer(plan, prefill), prefill.drain_s)
    raise ConfigError(f"the configuration has no node '{name}'", hint=f"its nodes are: {', '.join(_names(plan))}")


def _names(plan: Plan) -> list[str]:
    return [n.name for pool in plan.config.pools for n in pool.nodes] + [p.name for p in plan.config.prefill]


def _run_loop(work: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    result: int = uvloop.run(work)
    return result
