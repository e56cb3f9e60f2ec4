"""A decode node that holds KV for nobody (:mod:`pdhub.router.unused`) is taken out, so that it can be started again.

The router starts nothing: it says in its `/ready` document which node is free of work, and whoever supervises the
node (`pdhub up`, or an orchestrator) starts it again. The mark is void as soon as another process answers there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pdhub.config.models import RecycleConfig
from pdhub.router.endpoint import Endpoint
from pdhub.router.fleet import Fleet, Pool
from pdhub.router.unused import Unused

log = logging.getLogger("pdhub.router.recycle")

WITHIN_S = 120.0
"""A node that is out and has not been started again by then serves on."""


@dataclass(slots=True)
class _Watched:
    """Args:
    area: requests in flight, integrated until the last look: it differs if there was one in between.
    said: that it holds KV for nobody. out_at: when it was taken out. away: it has been gone since.
    due: it may be started again: seen without work after it was taken out. not_before: it is not taken out again.
    """

    pool: Pool
    node: Endpoint
    unused: Unused
    area: float = 0.0
    said: bool = False
    out_at: float = 0.0
    away: bool = False
    due: bool = False
    not_before: float = 0.0


class Recycler:
    """Watches the decode nodes of other servers (nodes of `pdhub node` own their memory, and free it).

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, fleet: Fleet, config: RecycleConfig, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._config = config
        self._clock = clock
        self._watched = {
            node.name: _Watched(pool, node, Unused(config.after_s, pool.client.lets_go_s, pool.client.lets_go_lost_s))
            for pool in fleet.pools.values()
            if pool.needs_prefill
            for node in pool.nodes.values()
            if not node.hosted
        }

    def probed(self, endpoint: Endpoint) -> None:
        """After every probe, of whatever endpoint."""
        if endpoint.role == "prefill":
            for watched in self._watched.values() if endpoint.gone else ():
                if endpoint in self._fleet.prefills_of(watched.pool.name):
                    watched.unused.lost()
        elif (found := self._watched.get(endpoint.name)) is None:
            return
        elif not endpoint.problem:
            self._answered(found, self._clock())
        elif endpoint.gone:
            found.unused.void()
            found.away, found.due, found.said = True, False, False

    def ratios(self) -> Iterator[tuple[str, float]]:
        """Now: (node, share of its KV memory that it holds for nobody)."""
        now = self._clock()
        for name, watched in self._watched.items():
            yield name, 0.0 if watched.unused.stranded_s(now) is None else watched.unused.usage

    def document(self) -> dict[str, Any]:
        """By node, of those that hold KV for nobody: how much, for how long, and what is to be done.

        ``state``: ``held`` (nothing), ``draining`` (it was taken out, and may have work), ``restart`` (it has none).
        """
        now, found = self._clock(), {}
        for name, watched in self._watched.items():
            stranded_s = watched.unused.stranded_s(now)
            if watched.node.retiring:
                state = "restart" if watched.due and not watched.node.in_flight else "draining"
            elif stranded_s is not None:
                state = "held"
            else:
                continue
            found[name] = {"kv": watched.unused.usage, "seconds": round(stranded_s or 0.0, 1), "state": state}
        return found

    def _answered(self, watched: _Watched, now: float) -> None:
        node, unused = watched.node, watched.unused
        area, watched.area = watched.area, node.area(now)
        unused.seen(node.load, bool(node.in_flight or node.owed) or area != watched.area, now)
        if node.retiring:
            self._out(watched, now)
        elif unused.stranded_s(now) is None:
            watched.said = False
        else:
            reason = self._kept(watched, now)
            if not reason or not watched.said:
                will = f"it stays ({reason})" if reason else "it is taken out, to be started again"
                log.warning("'%s' holds %s for nobody: %s", node.name, _share(unused.usage), will)
                watched.said = True
            if not reason:
                node.retiring = f"{_share(unused.usage)} is held for nobody; it is to be started again"
                watched.out_at, watched.away, watched.due = now, False, False
                self._fleet.changed(node)

    def _kept(self, watched: _Watched, now: float) -> str:
        """Why it is not taken out; empty if it is."""
        node, config = watched.node, self._config
        if config.when == "never":
            return "router.recycle.when is never"
        if node.name not in config.nodes:
            return "router.recycle.nodes does not name it"
        if watched.unused.usage <= config.above:
            return f"that is not more than {config.above:.1%}"
        if any(other.retiring for other in watched.pool.nodes.values()):
            return "another node of its pool goes first"
        if self._alone(watched, now):
            return "no other node of its pool can serve"
        if now < watched.not_before:
            return "it was started again just before"
        return ""

    def _alone(self, watched: _Watched, now: float) -> bool:
        if self._config.when == "always":
            return False
        return not any(other.usable(now) for other in watched.pool.nodes.values() if other is not watched.node)

    def _out(self, watched: _Watched, now: float) -> None:
        """It is out, and answers."""
        unused = watched.unused
        if watched.away:
            self._back(watched, now, "another process answers")
        elif not unused.usage:
            self._back(watched, now, "it holds nothing any more")
        elif self._alone(watched, now):
            self._back(watched, now, "no other node of its pool can serve any more")
        elif now - watched.out_at > WITHIN_S:
            self._back(watched, now, f"nobody has started it again within {WITHIN_S:g} s")
        else:
            watched.due = unused.quiet

    def _back(self, watched: _Watched, now: float, why: str) -> None:
        """It serves on, and for as long as it was out it is not taken out again: what strands KV again and again must
        not keep a node from serving."""
        watched.node.retiring = ""
        watched.due = False
        watched.not_before = now + (now - watched.out_at)
        self._fleet.changed(watched.node)
        log.info("'%s' is used again: %s", watched.node.name, why)


def _share(usage: float) -> str:
    return f"{usage:.1%} of its KV memory"
