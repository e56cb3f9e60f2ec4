"""Entry point: specs only. The factories import torch and transformers when they are called."""

from __future__ import annotations

from collections.abc import Iterable

from pdhub.api import (
    Command,
    CommandSpec,
    DecodeEngine,
    EngineContext,
    EngineSpec,
    Operate,
    PrefillEngine,
    Stability,
    hookimpl,
)
from pdhub_transformers.abilities import declared
from pdhub_transformers.config import TransformersConfig


def _runtime(config: TransformersConfig, context: EngineContext) -> DecodeEngine:
    from pdhub_transformers.runtime import TransformersEngine

    return TransformersEngine(config, context)


def _prefill(config: TransformersConfig, context: EngineContext) -> PrefillEngine:
    from pdhub_transformers.prefill import TransformersPrefill

    return TransformersPrefill(config, context)


def _operate(config: TransformersConfig) -> Operate:
    from pdhub_transformers.operate import TransformersOperate

    return TransformersOperate(config)


def _command() -> Command:
    from pdhub_transformers.command import TransformersCommand

    return TransformersCommand()


@hookimpl
def pdhub_register_engines() -> Iterable[EngineSpec]:
    return [
        EngineSpec(
            name="transformers",
            summary="Hugging Face Transformers in the node's process, on CPU or CUDA: decode and embedded prefill.",
            config=TransformersConfig,
            stability=Stability.BETA,
            runtime=_runtime,
            prefill=_prefill,
            operate=_operate,
            declares=declared,
        )
    ]


@hookimpl
def pdhub_register_commands() -> Iterable[CommandSpec]:
    return [
        CommandSpec(
            name="transformers",
            summary="Convert GGUF files to Hugging Face directories.",
            stability=Stability.BETA,
            factory=_command,
        )
    ]
