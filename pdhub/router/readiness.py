"""Whether the router can serve, and what is missing."""

from __future__ import annotations

from typing import Any

from pdhub.router.endpoint import Endpoint
from pdhub.router.fleet import Fleet, Pool, fits


def readiness(fleet: Fleet, now: float) -> tuple[bool, dict[str, Any]]:
    """Ready = one decode node can be reached now, with a prefill instance that fits it where it needs one.

    Returns:
        Whether it is ready, and a document for people: every endpoint's health and every problem.
    """
    problems: list[str] = []
    usable = 0
    for pool in fleet.pools.values():
        for node in pool.nodes.values():
            problem = _problem(fleet, pool, node, now)
            if problem is None:
                usable += 1
            else:
                problems.append(f"{node.name}: {problem}")
    problems += [f"{p.name}: {_sick(p, now)}" for p in fleet.prefills.values() if not p.usable(now)]
    problems += [f"pair {problem}" for problem in fleet.pairs.problems()]
    document = {
        "status": "ready" if usable else "not ready",
        "problems": problems,
        "prefill": {p.name: p.health(now).value for p in fleet.prefills.values()},
        "pools": {
            pool.name: {name: node.health(now).value for name, node in pool.nodes.items()}
            for pool in fleet.pools.values()
        },
        "pairs": {f"{p} → {n}": found.verdict.value for (p, n), found in fleet.pairs.found.items()},
    }
    return usable > 0, document


def _problem(fleet: Fleet, pool: Pool, node: Endpoint, now: float) -> str | None:
    if not node.usable(now):
        return _sick(node, now)
    if not pool.needs_prefill:
        return None
    accepts = pool.client.accepts(node.info)
    known = [p for p in fleet.prefills_of(pool.name) if p.info]
    if known and not any(fits(p, accepts) for p in known):
        return "KV layout mismatch: no prefill instance writes a layout that it takes"
    ready = [p for p in known if p.usable(now) and fits(p, accepts)]
    if not ready:
        return "no prefill instance is ready for it"
    if all(fleet.pairs.held(p.name, node.name) for p in ready):
        return "no prefill instance has passed the self-check with it"
    return None


def _sick(endpoint: Endpoint, now: float) -> str:
    health = endpoint.health(now).value
    why = endpoint.problem or endpoint.retiring
    return f"{health} ({why})" if why else health
