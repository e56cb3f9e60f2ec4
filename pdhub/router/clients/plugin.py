"""Registers the built-in engine client ``openai``. (The client of hosted engines needs no name.)"""

from __future__ import annotations

from pdhub.api.hooks import hookimpl
from pdhub.api.plugin import EngineSpec, Stability
from pdhub.router.clients.openai import OpenAIClient, OpenAIConfig, declared


@hookimpl
def pdhub_register_engines() -> list[EngineSpec]:
    return [
        EngineSpec(
            name="openai",
            summary="Any OpenAI-compatible server that prefills itself; answers are relayed byte for byte.",
            config=OpenAIConfig,
            stability=Stability.BETA,
            client=OpenAIClient,
            declares=declared,
        )
    ]
