"""Options of the parser ``vllm``. Light: no vllm."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator

from pdhub.api import Feature, PluginConfig


class Via(StrEnum):
    """Who runs vLLM's parsers. ``CHILD``: a process of the router's own. ``DERENDER``: the prefill instance, at its
    endpoint of that name. ``AUTO``: that endpoint for what it does in one call, where it is on; else the process."""

    AUTO = "auto"
    CHILD = "child"
    DERENDER = "derender"


class VLLMParserConfig(PluginConfig):
    """`model.parser: {type: vllm, config: …}`. At least one of `reasoning` and `tools` is named."""

    reasoning: str | None = Field(None, description="`--reasoning-parser` of vLLM, such as `deepseek_r1`.")
    tools: str | None = Field(None, description="`--tool-call-parser` of vLLM, such as `hermes`.")
    via: Via = Field(
        Via.AUTO,
        description="`child`: a process of the router's runs the parsers. `derender`: the prefill instance does "
        "(vLLM 0.32 and later with `--enable-scale-out` and the same parsers); streams cost it much. `auto`: the "
        "instance for answers that are not streamed, where its endpoint is on, else the process.",
    )
    python: str | None = Field(
        None,
        description="A Python that has vllm, for the process; default is that of the first `serve.command` that "
        "names one by its path, else the router's own.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="`--default-chat-template-kwargs` of the prefill instances."
    )
    tools_plugin: str | None = Field(None, description="`--tool-parser-plugin`: a Python file that registers more.")
    reasoning_plugin: str | None = Field(
        None, description="`--reasoning-parser-plugin`: a Python file that registers more."
    )
    tokenizer_mode: str = Field("auto", description="`--tokenizer-mode` of vLLM.")
    trust_remote_code: bool = Field(False, description="`--trust-remote-code` of vLLM, for the tokenizer.")
    start_within_s: float = Field(
        300.0, gt=0, le=3600, description="The process must be ready after that long; importing vllm takes its time."
    )
    within_s: float = Field(
        10.0, gt=0, le=600, description="One step of parsing may take that long; then the process is started anew."
    )
    queue: int = Field(
        1024, ge=1, description="Steps that may wait for the process; a request that would wait longer is refused."
    )

    @model_validator(mode="after")
    def _names_one(self) -> VLLMParserConfig:
        if self.reasoning is None and self.tools is None:
            raise ValueError("name `reasoning`, `tools` or both: what the model's vLLM servers are started with")
        return self


def declared(config: VLLMParserConfig) -> frozenset[Feature]:
    """What pools that speak tokens can do because of it."""
    named = {Feature.REASONING: config.reasoning, Feature.TOOLS: config.tools}
    return frozenset(feature for feature, name in named.items() if name is not None)
