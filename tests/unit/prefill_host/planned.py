"""A plan of the toy engine and one transport, without a registry."""

from __future__ import annotations

from typing import Any

from pdhub.api import EngineSpec, TransportSpec
from pdhub.config.build import Plan, Resolved
from pdhub.config.models import Config
from pdhub.testing import toy
from pdhub.testing.memory import MemoryTransport

MEMORY = TransportSpec(name="memory", summary="in process", factory=lambda config: MemoryTransport())


def make_plan(
    *,
    prefill: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
    transport: TransportSpec = MEMORY,
    engine: EngineSpec | None = None,
    **sections: Any,
) -> Plan:
    spec = engine or toy.pdhub_register_engines()[0]
    handoff = {"transport": {"type": transport.name}, "staging_bytes": 1 << 20, **sections.pop("handoff", {})}
    config = Config.model_validate(
        {
            "model": {"name": "toy", "aliases": ["toy-alias"]},
            "prefill": [{"name": "prefill-0", "port": 0, "engine": {"type": "toy", "config": prefill or {}}}],
            "pools": [
                {
                    "name": "general",
                    "engine": {"type": "toy", "config": pool or {}},
                    "nodes": [{"name": "node-0", "port": 0}],
                }
            ],
            "policy": {"type": "any"},
            "handoff": handoff,
            **sections,
        }
    )
    return Plan(
        config=config,
        registry=None,  # type: ignore[arg-type]
        transport=Resolved(transport, transport.config()),
        policy=None,  # type: ignore[arg-type]
        order=None,  # type: ignore[arg-type]
        routing=None,  # type: ignore[arg-type]
        classes=None,  # type: ignore[arg-type]
        launcher=None,  # type: ignore[arg-type]
        pools={"general": Resolved(spec, spec.config.model_validate(pool or {}))},
        prefill={"prefill-0": Resolved(spec, spec.config.model_validate(prefill or {}))},
    )
