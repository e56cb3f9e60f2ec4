"""How busy a node is, from two sources that each see only a part."""

from __future__ import annotations

from pdhub.api.policy import NodeView, PoolView


def busy(node: NodeView) -> int:
    """Requests on it: the router's own count, or the engine's last word where that is more (other routers send
    there too). The own count is newer, the engine's is wider; the sum would count most requests twice."""
    load = node.load
    if load.running is None and load.waiting is None:
        return node.in_flight
    return max(node.in_flight, (load.running or 0) + (load.waiting or 0))


def places(pool: PoolView, node: NodeView) -> int:
    """Requests that it runs at once, at least 1; where it does not say, an equal share of its pool's."""
    return node.slots or max(1, pool.capabilities.slots // max(1, len(pool.nodes)))


def waiting(pool: PoolView, node: NodeView) -> int:
    """Requests that wait at it: told by the engine, or beyond its places."""
    return max(node.load.waiting or 0, busy(node) - places(pool, node), 0)


def fullness(pool: PoolView, node: NodeView) -> float:
    """Requests a place, 0 and up; or the share of its KV memory in use where that is more."""
    return max(busy(node) / places(pool, node), node.load.kv_usage or 0.0)
