"""Options of the engine, for both facets. Light: no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pdhub.api import PluginConfig


class TransformersConfig(PluginConfig):
    """`engine: {type: transformers, config: …}` of a pool (decode) or a prefill instance."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Type of weights and KV cache; prefill and nodes must agree."
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="`cpu`, `cuda` or `cuda:N`.")
    weights: Literal["file", "random"] = Field(
        "file", description="`random` needs a `config.json` only: for measuring speed, as vLLM's `--load-format dummy`."
    )
    max_context: int | None = Field(
        None, ge=1, description="Tokens of prompt plus output; default is the model's limit, at most 8192."
    )
    block_tokens: int = Field(16, ge=1, le=1024, description="Tokens a KV block covers; prefill and nodes must agree.")
    threads: int = Field(0, ge=0, description="CPU threads if the node sets none; 0 lets torch choose.")
    cache_dir: str | None = Field(
        None, description="Where a GGUF file is converted to; default `~/.cache/pdhub/transformers`."
    )
    slots: int = Field(1, ge=1, le=256, description="Decode: requests that run at once.")
    batching: Literal["auto", "exact", "fast"] = Field(
        "auto",
        description="Decode: `exact` computes each row as if it were alone, bit for bit; `fast` lets the row count "
        "change the rounding; `auto` is `exact` on CPU and `fast` on CUDA.",
    )
    graphs: Literal["off", "on", "compiled"] = Field(
        "on",
        description="Decode on CUDA, not with `batching: exact`: a step of one request is one CUDA graph. `compiled` "
        "lets torch compile it first: a start takes about a minute more, a step less.",
    )
    speculation: Literal["none", "prompt_lookup"] = Field(
        "none", description="Decode: propose tokens that followed the same n-gram earlier and verify them in one step."
    )
    speculation_tokens: int = Field(4, ge=1, le=32, description="Decode: most tokens proposed at once.")
    speculation_ngram_max: int = Field(3, ge=1, le=16, description="Decode: longest n-gram looked up.")
    speculation_ngram_min: int = Field(2, ge=1, le=16, description="Decode: shortest n-gram looked up.")
    chunk_tokens: int = Field(
        512, ge=1, description="Prefill: tokens of one forward pass, a multiple of `block_tokens`."
    )

    @model_validator(mode="after")
    def _consistent(self) -> TransformersConfig:
        if self.chunk_tokens % self.block_tokens:
            raise ValueError(
                f"chunk_tokens ({self.chunk_tokens}) must be a multiple of block_tokens ({self.block_tokens})"
            )
        if self.speculation_ngram_min > self.speculation_ngram_max:
            raise ValueError("speculation_ngram_min must not be larger than speculation_ngram_max")
        return self
