"""Every shipped configuration loads with the plugins that it names."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from pdhub.config.build import load_config, load_plan

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_hosts_part_is_valid(path: Path) -> None:
    config, _ = load_config(path)
    assert config.pools


def test_the_quickstart_resolves_every_plugin() -> None:
    path = next(path for path in CONFIGS if path.name == "quickstart.yaml")
    try:
        metadata.version("pdhub-transformers")
    except metadata.PackageNotFoundError:
        pytest.skip("pdhub-transformers is not installed")
    plan = load_plan(path)
    slots = {name: resolved.config.model_dump()["slots"] for name, resolved in plan.pools.items()}
    assert slots == {"fast": 1, "general": 4}
    assert plan.pools["fast"].config.model_dump()["speculation"] == "prompt_lookup"
    assert plan.transport.spec.name == "shm"
    assert plan.policy.spec.name == "slo_threshold"
