"""Deployment side: how decode servers start, what they need of a prefill instance, and what is wrong with either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdhub.api import Finding, NodeSpec, Operate, Process, Topology
from pdhub_tilert.config import TileRTConfig


class TileRTOperate(Operate):
    """See :class:`pdhub.api.Operate`."""

    def __init__(self, config: TileRTConfig) -> None:
        self._config = config

    def process(self, node: NodeSpec, topology: Topology) -> Process:
        from pdhub_tilert.operate_serve import process

        return process(node)

    def prefill_child(self, node: NodeSpec, topology: Topology) -> Mapping[str, Any]:
        from pdhub_tilert.operate_serve import child

        return child(self._config)

    def refusals(self, topology: Topology) -> Sequence[Finding]:
        from pdhub_tilert.operate_refusals import refusals

        return tuple(refusals(topology))

    def checks(self, topology: Topology) -> Sequence[Finding]:
        from pdhub_tilert.operate_checks import checks

        return tuple(checks(self._config, topology))
