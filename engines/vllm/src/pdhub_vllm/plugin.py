"""Entry point: specs only."""

from __future__ import annotations

from collections.abc import Iterable

from pdhub.api import Capabilities, Command, CommandSpec, EngineClient, EngineSpec, Operate, Stability, hookimpl
from pdhub_vllm.abilities import declared
from pdhub_vllm.config import VLLMConfig


def _client(config: VLLMConfig) -> EngineClient:
    from pdhub_vllm.client import client_of

    return client_of(config)


def _declares(config: VLLMConfig) -> Capabilities:
    return declared(config)


def _operate(config: VLLMConfig) -> Operate:
    from pdhub_vllm.operate import VLLMOperate

    return VLLMOperate(config)


def _command() -> Command:
    from pdhub_vllm.command import VLLMCommand

    return VLLMCommand()


@hookimpl
def pdhub_register_engines() -> Iterable[EngineSpec]:
    return [
        EngineSpec(
            name="vllm",
            summary="Stock vLLM servers: NIXL pull, NIXL push, Mooncake, or aggregated; answers are relayed.",
            config=VLLMConfig,
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
            name="vllm",
            summary="How a vLLM server of a configuration is started; what a version of vLLM lacks.",
            stability=Stability.ALPHA,
            factory=_command,
        )
    ]
