"""A decode engine that costs nothing: it takes any KV, looks at none of it, and says the same token again and again.

A plugin (``blank``) for benchmarks of everything around an engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from pydantic import Field

from pdhub.api import (
    Capabilities,
    ClaimRequest,
    DecodeEngine,
    DecodeRequest,
    EngineContext,
    EngineInfo,
    EngineLoad,
    EngineSpec,
    Feature,
    Finished,
    FinishReason,
    GroupKind,
    Handoff,
    KVGroup,
    KVLayout,
    Landing,
    PluginConfig,
    TokenChunk,
    hookimpl,
)

BLOCK_TOKENS = 16
LAYOUT = KVLayout(
    model="blank",
    version=1,
    shards=1,
    groups=(
        KVGroup(
            name="kv",
            kind=GroupKind.FULL,
            layers=(0,),
            block_tokens=BLOCK_TOKENS,
            block_bytes=BLOCK_TOKENS,
            axes=(f"token:{BLOCK_TOKENS}", "byte:1"),
            dtype="uint8",
        ),
    ),
)
"""One byte a token."""


class BlankConfig(PluginConfig):
    """Options of the blank engine."""

    max_context: int = Field(65_536, ge=8, description="Prompt plus output, in tokens.")
    slots: int = Field(4, ge=1, description="Requests that decode at once.")

    def capabilities(self) -> Capabilities:
        features = frozenset({Feature.SAMPLING, Feature.IGNORE_EOS, Feature.TOP_K, Feature.MIN_P, Feature.SEED})
        return Capabilities(features, max_context=self.max_context, slots=self.slots)


class BlankEngine(DecodeEngine):
    """See :class:`pdhub.api.DecodeEngine`."""

    def __init__(self, config: BlankConfig, context: EngineContext) -> None:
        self._config = config
        self._transport = context.transport
        self._claimed = 0

    async def start(self) -> EngineInfo:
        return EngineInfo(self._config.capabilities(), accepts=(LAYOUT,), model="blank")

    def claim(self, request: ClaimRequest) -> Landing:
        tokens = -(-request.tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        self._claimed += 1
        region = self._transport.allocate(LAYOUT.landing_bytes(tokens))
        return Landing(f"blank-{self._claimed}", tokens, LAYOUT, (region,))

    async def inject(self, landing: Landing, handoff: Handoff) -> None:
        return None

    async def decode(self, landing: Landing, request: DecodeRequest) -> AsyncIterator[TokenChunk | Finished]:
        for _ in range(request.max_tokens):
            yield TokenChunk((request.first_token,))
        yield Finished(FinishReason.LENGTH, request.max_tokens)

    def cancel(self, transfer_id: str) -> None:
        return None

    def release(self, landing: Landing) -> None:
        for region in landing.regions:
            self._transport.unregister(region.id)

    def load(self) -> EngineLoad:
        return EngineLoad(running=0, waiting=0)

    async def close(self) -> None:
        return None


@hookimpl
def pdhub_register_engines() -> list[EngineSpec]:
    return [
        EngineSpec(
            name="blank",
            summary="Takes any KV and says the same token again and again.",
            config=BlankConfig,
            runtime=BlankEngine,
            declares=BlankConfig.capabilities,
        )
    ]
