"""Entry point: specs only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdhub.api import (
    Capabilities,
    Command,
    CommandSpec,
    EngineClient,
    EngineSpec,
    Finding,
    Operate,
    ParserContext,
    ParserFactory,
    ParserSpec,
    Stability,
    hookimpl,
)
from pdhub_vllm.abilities import declared
from pdhub_vllm.config import VLLMConfig
from pdhub_vllm.parser_config import VLLMParserConfig
from pdhub_vllm.parser_config import declared as parsed


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


def _parser(config: VLLMParserConfig, context: ParserContext) -> ParserFactory:
    from pdhub_vllm.parser import VLLMParserFactory

    return VLLMParserFactory(config, context)


def _parser_refusals(config: VLLMParserConfig, context: ParserContext) -> Sequence[Finding]:
    from pdhub_vllm.parser_checks import refusals

    return refusals(config, context)


def _parser_checks(config: VLLMParserConfig, context: ParserContext) -> Sequence[Finding]:
    from pdhub_vllm.parser_checks import checks

    return checks(config, context)


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
def pdhub_register_parsers() -> Iterable[ParserSpec]:
    return [
        ParserSpec(
            name="vllm",
            summary="vLLM's own reasoning and tool parsers, in a process of their own or on the prefill instance.",
            config=VLLMParserConfig,
            stability=Stability.ALPHA,
            factory=_parser,
            declares=parsed,
            refusals=_parser_refusals,
            checks=_parser_checks,
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
