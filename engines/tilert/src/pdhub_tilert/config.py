"""Options of a pool. Light: no tilert, no torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, field_validator

from pdhub.api import Feature, PluginConfig
from pdhub_tilert.profiles import KVDtype, Profile

_ALIASES = {
    "glm_5": "glm5", "glm-5": "glm5", "glm5.2": "glm5_2", "glm-5.2": "glm5_2", "glm_5_2": "glm5_2", "glm52": "glm5_2",
    "glm5.3": "glm5_2", "glm5_3": "glm5_2", "glm-5.3": "glm5_2", "deepseek_v3_2": "dsv32", "deepseek-v3.2": "dsv32",
    "dsv3.2": "dsv32",
}  # fmt: skip


class FirstToken(StrEnum):
    """How prefill tells the first token: ``IDS`` by `return_token_ids`, ``LOGPROBS`` by log probabilities."""

    IDS = "ids"
    LOGPROBS = "logprobs"


class ServeConfig(PluginConfig):
    """`serve` of a pool: how its decode servers start."""

    python: str = Field("python3", description="Interpreter that has TileRT.")
    weights_dir: str | None = Field(None, description="Converted weights: `--save-dir` of `pdhub tilert convert`.")
    engine: Literal["tilert", "stub"] = Field(
        "tilert", description="`stub` answers fixed tokens; for trying everything but the kernels."
    )
    buffer_device: Literal["cuda", "cpu"] = Field(
        "cuda", description="Where the receive buffer is. `cpu`: pinned host memory, one copy more a request."
    )
    shards: int | None = Field(
        None,
        ge=1,
        le=8,
        description="`TILERT_PD_SHARDS`: devices that the receive buffer is spread over; default is 1 with NIXL (which "
        "knows one device only) and 8 with Mooncake.",
    )
    senders: int | None = Field(
        None,
        ge=1,
        le=8,
        description="`TILERT_PD_SENDERS`: prefill ranks that write; the same on both sides. Default as `shards`.",
    )
    probe_address: str | None = Field(
        None, description="`TILERT_PD_PROBE_ADDR`: an address whose route names the interface to use; default 8.8.8.8."
    )
    poll_ms: int = Field(
        5,
        ge=1,
        description="`TILERT_DECODE_POLL_MS`: how often the server looks for new tokens. TileRT's own default, 200, is "
        "seen by clients as gaps of 200 ms.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Further environment variables; they win.")
    args: list[str] = Field(default_factory=list, description="Further arguments of the decode server.")
    ready_within_s: float = Field(
        3600.0, gt=0, description="A server that has not loaded its weights after that long has failed to start."
    )


class ModelConfig(PluginConfig):
    """Which model a pool serves, and how its cache looks; of both kinds of pools."""

    profile: Profile = Field(Profile.GLM5, description="Model profile, `--model`: `glm5`, `glm5_2` or `dsv32`.")
    max_seq_len: int = Field(
        202_752, gt=64, description="`--max-seq-len`: prompt plus output in tokens, of every node and the connector."
    )
    kv_cache_dtype: KVDtype = Field(
        KVDtype.FP8, description="MLA cache of the prefill instances: `fp8_ds_mla` or `bf16`."
    )
    mtp: bool = Field(True, description="Speculative decoding with the model's draft layer; its KV comes from prefill.")
    features: list[Feature] | None = Field(
        None, description="What a node can do; default is what TileRT can do and the node says of itself."
    )

    @field_validator("profile", mode="before")
    @classmethod
    def _alias(cls, value: Any) -> Any:
        return _ALIASES.get(value.lower(), value) if isinstance(value, str) else value

    @field_validator("kv_cache_dtype", mode="before")
    @classmethod
    def _dtype(cls, value: Any) -> Any:
        return {"fp8": "fp8_ds_mla", "fp8_e4m3": "fp8_ds_mla", "bfloat16": "bf16"}.get(value, value)


class TileRTConfig(ModelConfig):
    """`engine: {type: tilert, config: …}` of a pool of stock TileRT decode servers.

    Every node takes one request at a time. Its prefill instances are vLLM servers with TileRT's connector, which
    `pdhub vllm command` puts into their transfer config.
    """

    transport: Literal["nixl", "mooncake"] = Field("nixl", description="What moves KV; the same on both ends.")
    ctrl_host: str | None = Field(
        None, description="Where prefill instances reach the nodes' control port; default is each node's `host`."
    )
    ctrl_port: int | None = Field(
        None, ge=1, le=65_535, description="`--ctrl-port`; default is each node's `port` minus 1."
    )
    first_token: FirstToken = Field(
        FirstToken.IDS,
        description="How prefill tells the first token: `ids` (`return_token_ids`), or `logprobs`, for a vLLM that "
        "knows only token ids in log probabilities.",
    )
    handovers: int = Field(
        1,
        ge=0,
        description="Hand-overs that one prefill instance may have under way at once. TileRT's connector has one "
        "staging area: a second one may overwrite the first. 0 = no limit, for a connector without that fault.",
    )
    settle_s: float = Field(
        2.0,
        ge=0,
        le=600,
        description="After a hand-over that was broken off: how long its prefill instance may still write it.",
    )
    tombstone_s: float = Field(
        120.0,
        ge=0,
        le=86_400,
        description="A node that stopped answering gets no request for so long: TileRT's own time-out of a receive "
        "slot, during which a late writer may still hold it.",
    )
    serve: ServeConfig = Field(default_factory=ServeConfig, description="How `pdhub up` starts the decode servers.")


class TileRTNodeConfig(ModelConfig):
    """`engine: {type: tilert-node, config: …}` of a pool whose nodes `pdhub node` hosts: TileRT's engine in the node's
    process, filled by pdhub's own connector over `handoff.transport`.

    Every node takes one request at a time, and receives the next one's KV meanwhile. `model.path` is the model's
    Hugging Face directory.
    """

    weights_dir: str | None = Field(None, description="Converted weights: `--save-dir` of `pdhub tilert convert`.")
    engine: Literal["tilert", "stub"] = Field(
        "tilert", description="`stub` answers fixed tokens; for trying everything but the kernels."
    )
    shards: int = Field(
        1,
        ge=1,
        le=8,
        description="Workers of a prefill instance that write, each its own layers; divides its tensor parallelism. "
        "Where there are GPUs, shard N lands on device N.",
    )
    python: str | None = Field(
        None, description="Interpreter that has TileRT and pdhub; default is the one that runs `pdhub`."
    )
    ready_within_s: float = Field(
        3600.0, gt=0, description="A node that has not loaded its weights after that long has failed to start."
    )
