"""Deployment side. pdhub starts no vLLM yet: instances run at the configured addresses."""

from __future__ import annotations

from pdhub.api import Operate
from pdhub_vllm.config import VLLMConfig


class VLLMOperate(Operate):
    """Starts nothing and checks nothing."""

    def __init__(self, config: VLLMConfig) -> None:
        self._config = config
