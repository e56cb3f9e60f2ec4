"""Scorers that send alike requests to the same node, where the KV of their common beginning may still be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pydantic import Field

from pdhub.api.plugin import NoConfig, PluginConfig
from pdhub.api.policy import Scorer
from pdhub.api.request import RequestRecord, RequestView
from pdhub.policies.draw import mix, seed_of
from pdhub.policies.scorers import Nodes


class SessionAffinityScorer(Scorer):
    """1 for a session's own node in each pool, 0 for the others.

    The node follows from the names alone (highest random weight), so that all routers agree without talking, nothing
    is remembered, and a node that comes or goes moves only its own sessions. Without a session all score the same.
    """

    def __init__(self, config: NoConfig) -> None:
        del config

    def score(self, request: RequestView, nodes: Nodes, now: float) -> Sequence[float]:
        if not request.session:
            return [0.0] * len(nodes)
        seed = seed_of(request.session)
        weights = [(mix(seed, node.name), node.name) for _, node in nodes]
        best: dict[str, tuple[int, str]] = {}
        for (pool, _), weight in zip(nodes, weights, strict=True):
            best[pool.name] = max(best.get(pool.name, weight), weight)
        return [float(best[pool.name] == weight) for (pool, _), weight in zip(nodes, weights, strict=True)]


class PrefixAffinityConfig(PluginConfig):
    """Options of ``prefix_affinity``."""

    entries: int = Field(65_536, ge=1, description="Prompt blocks remembered, the latest ones; about 250 bytes each.")
    holders: int = Field(4, ge=1, le=64, description="Nodes remembered a block, the latest ones.")


class PrefixAffinityScorer(Scorer):
    """The share of the prompt's blocks that a node has, or has probably seen.

    Where an engine tells what its cache holds, that counts. Elsewhere it is approximate: it knows what this router
    sent, not what a node has dropped since. It learns at the end of a request, from the prefill instance and the node
    that served it.
    """

    def __init__(self, config: PrefixAffinityConfig) -> None:
        self._config = config
        self._seen: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._shared: dict[tuple[str, ...], tuple[str, ...]] = {}

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._seen)

    def score(self, request: RequestView, nodes: Nodes, now: float) -> Sequence[float]:
        depths, told = self._depths(request.prefix), request.cached
        if not depths and not told:
            return [0.0] * len(nodes)
        blocks = len(request.prefix) or 1
        return [told.get(node.name, depths.get(node.name, 0) / blocks) for _, node in nodes]

    def observe(self, record: RequestRecord) -> None:
        holders = [name for name in (record.node, record.prefill) if name is not None]
        if not holders or (record.ttft_ms is None and record.outcome != "ok"):
            return  # it computed nothing
        # The longest first: the shared beginning of many prompts ends up as the latest used, and stays longest.
        for digest in reversed(record.prefix):
            known = self._seen.pop(digest, ())
            names = tuple(holders + [name for name in known if name not in holders])[
                : max(len(holders), self._config.holders)
            ]
            self._seen[digest] = self._share(names)
        while len(self._seen) > self._config.entries:
            self._seen.popitem(last=False)

    def _share(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """One object for equal tuples; forgotten as a whole when node names came and went too often."""
        if len(self._shared) > 4096:
            self._shared.clear()
        return self._shared.setdefault(names, names)

    def _depths(self, prefix: Sequence[int]) -> dict[str, int]:
        """Blocks of the prompt that each node has seen, for nodes that saw any."""
        found: dict[str, int] = {}
        for depth in range(len(prefix), 0, -1):
            for name in self._seen.get(prefix[depth - 1], ()):
                found.setdefault(name, depth)
        return found
