"""Entry point: specs only."""

from __future__ import annotations

from collections.abc import Iterable

from pdhub.api import (
    Capabilities,
    Command,
    CommandSpec,
    DecodeEngine,
    EngineClient,
    EngineContext,
    EngineSpec,
    Operate,
    Stability,
    hookimpl,
)
from pdhub_tilert.abilities import declared
from pdhub_tilert.config import ModelConfig, TileRTConfig, TileRTNodeConfig


def _client(config: TileRTConfig) -> EngineClient:
    from pdhub_tilert.client import TileRTClient

    return TileRTClient(config)


def _declares(config: ModelConfig) -> Capabilities:
    return declared(config)


def _runtime(config: TileRTNodeConfig, context: EngineContext) -> DecodeEngine:
    from pdhub_tilert.runtime import TileRTEngine

    return TileRTEngine(config, context)


def _operate_node(config: TileRTNodeConfig) -> Operate:
    from pdhub_tilert.operate_node import TileRTNodeOperate

    return TileRTNodeOperate(config)


def _operate(config: TileRTConfig) -> Operate:
    from pdhub_tilert.operate import TileRTOperate

    return TileRTOperate(config)


def _command() -> Command:
    from pdhub_tilert.command import TileRTCommand

    return TileRTCommand()


@hookimpl
def pdhub_register_engines() -> Iterable[EngineSpec]:
    return [
        EngineSpec(
            name="tilert",
            summary="Stock TileRT decode servers, filled by TileRT's connector in a shared vLLM prefill instance.",
            config=TileRTConfig,
            stability=Stability.ALPHA,
            client=_client,
            operate=_operate,
            declares=_declares,
        ),
        EngineSpec(
            name="tilert-node",
            summary="TileRT's engine in a node of `pdhub node`, filled by pdhub's connector while it decodes.",
            config=TileRTNodeConfig,
            stability=Stability.ALPHA,
            runtime=_runtime,
            operate=_operate_node,
            declares=_declares,
        ),
    ]


@hookimpl
def pdhub_register_commands() -> Iterable[CommandSpec]:
    return [
        CommandSpec(
            name="tilert",
            summary="How the servers of a TileRT topology are started; start one; convert a model's weights.",
            stability=Stability.ALPHA,
            factory=_command,
        )
    ]
