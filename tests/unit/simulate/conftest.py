from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdhub.config.build import Plan, build_plan, parse_config
from pdhub.registry import Registry, load
from pdhub.simulate.cost import Costs, parse_costs
from pdhub.testing import toy

MakePlan = Callable[..., Plan]


@pytest.fixture(scope="session")
def registry() -> Registry:
    return load(extra=[toy], warn=False)


@pytest.fixture
def make_plan(registry: Registry) -> MakePlan:
    def make(policy: dict[str, Any] | None = None, *, nodes: int = 2, prefills: int = 2, **sections: Any) -> Plan:
        def pool(name: str, cost: float, tpot: float, growth: float) -> dict[str, Any]:
            return {
                "name": name,
                "cost": cost,
                "engine": {"type": "toy"},
                "nodes": [{"name": f"{name}-{i}", "port": 0} for i in range(nodes)],
                "latency": {"ttft_ms": 20, "ttft_ms_per_token": 0.05, "tpot_ms": tpot, "tpot_ms_per_request": growth},
            }

        return build_plan(
            parse_config(
                {
                    "model": {"name": "m"},
                    "prefill": [
                        {"name": f"prefill-{i}", "port": 0, "engine": {"type": "toy"}} for i in range(prefills)
                    ],
                    "pools": [pool("fast", 4, 4, 0), pool("general", 1, 12, 0.76)],
                    "policy": policy or {"type": "slo"},
                    **sections,
                }
            ),
            registry,
        )

    return make


@pytest.fixture
def costs() -> Costs:
    return parse_costs(
        {
            "prefill": {"model": "prefill-toy"},
            "pools": {"fast": {"model": "fast-toy"}, "general": {"model": "general-toy"}},
        }
    )
