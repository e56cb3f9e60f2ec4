"""What the configuration says about latencies, for the latency model."""

from __future__ import annotations

from pdhub.config.models import Config
from pdhub.core.latency import PoolSeed


def latency_seeds(config: Config) -> dict[str, PoolSeed]:
    """By pool; also those that say nothing."""
    return {pool.name: PoolSeed(**pool.latency.model_dump()) for pool in config.pools}
