"""Entry point: specs only."""

from __future__ import annotations

from collections.abc import Iterable

from pdhub.api import Capabilities, EngineClient, EngineSpec, Stability, hookimpl
from pdhub_tilert.abilities import declared
from pdhub_tilert.config import TileRTConfig


def _client(config: TileRTConfig) -> EngineClient:
    from pdhub_tilert.client import TileRTClient

    return TileRTClient(config)


def _declares(config: TileRTConfig) -> Capabilities:
    return declared(config)


@hookimpl
def pdhub_register_engines() -> Iterable[EngineSpec]:
    return [
        EngineSpec(
            name="tilert",
            summary="Stock TileRT decode servers, filled by TileRT's connector in a shared vLLM prefill instance.",
            config=TileRTConfig,
            stability=Stability.ALPHA,
            client=_client,
            declares=_declares,
        )
    ]
