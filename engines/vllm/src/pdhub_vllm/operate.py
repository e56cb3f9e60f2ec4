"""Deployment side: how vLLM servers start, what cannot work, and what is wrong with those that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdhub.api import Finding, NodeSpec, Operate, Process, Topology
from pdhub_vllm.config import Handoff, VLLMConfig
from pdhub_vllm.operate_transfer import HANDOFF


class VLLMOperate(Operate):
    """See :class:`pdhub.api.Operate`."""

    def __init__(self, config: VLLMConfig) -> None:
        self._config = config

    def process(self, node: NodeSpec, topology: Topology) -> Process:
        from pdhub_vllm.operate_serve import process

        return process(node, topology)

    def prefill_child(self, node: NodeSpec, topology: Topology) -> Mapping[str, Any] | None:
        """vLLM's own connector. The instance composes it from its own options, so only its kind is said."""
        return None if self._config.handoff is Handoff.NONE else {HANDOFF: self._config.handoff.value}

    def refusals(self, topology: Topology) -> Sequence[Finding]:
        from pdhub_vllm.operate_refusals import refusals

        return tuple(refusals(topology))

    def checks(self, topology: Topology) -> Sequence[Finding]:
        from pdhub_vllm.operate_checks import checks

        return tuple(checks(self._config, topology))
