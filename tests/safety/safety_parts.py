"""Plugin of the safety trials."""

from __future__ import annotations

from safety_engine import SafetyConfig, SafetyEngine, SafetyPrefill
from safety_transport import BoardTransportConfig

from pdhub.api import EngineSpec, TransportSpec, hookimpl


@hookimpl
def pdhub_register_engines() -> list[EngineSpec]:
    return [
        EngineSpec(
            name="safety",
            summary="Looks for another request's bytes in its landings.",
            config=SafetyConfig,
            runtime=SafetyEngine,
            prefill=SafetyPrefill,
            declares=SafetyConfig.capabilities,
        )
    ]


@hookimpl
def pdhub_register_transports() -> list[TransportSpec]:
    return [
        TransportSpec(
            name="board",
            summary="Another transport, with faults on request.",
            config=BoardTransportConfig,
            factory=lambda config: config.make(),
        )
    ]
