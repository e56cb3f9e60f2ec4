"""Entry point: specs only."""

from __future__ import annotations

from collections.abc import Iterable

from pdhub.api import Capabilities, Command, CommandSpec, EngineClient, EngineSpec, Operate, Stability, hookimpl
from pdhub_tilert.abilities import declared
from pdhub_tilert.config import TileRTConfig


def _client(config: TileRTConfig) -> EngineClient:
    from pdhub_tilert.client import TileRTClient

    return TileRTClient(config)


def _declares(config: TileRTConfig) -> Capabilities:
    return declared(config)


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
        )
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
