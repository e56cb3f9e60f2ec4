"""What may stand in ``kv_connector_extra_config``. `pdhub vllm command` writes all of it from the configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from pdhub.api.errors import ConfigError
from pdhub.api.plugin import PluginConfig


class ConnectorOptions(PluginConfig):
    """``kv_connector_extra_config`` of PDHubConnector."""

    transport: str = Field("shm", description="KV transport plugin; the nodes have the same one.")
    transport_config: dict[str, Any] = Field(default_factory=dict, description="Its options.")
    host: str = Field("127.0.0.1", description="Address at which the connector tells routers its KV layout.")
    port: int = Field(
        5580, ge=0, le=65_000, description="Port of it; rank N of data parallelism adds N. 0 = a free one."
    )
    block_tokens: int = Field(16, ge=1, le=1024, description="Tokens of a block on the wire; the nodes have the same.")
    form: Literal["rows", "planes"] = Field(
        "rows",
        description="`planes`: latent caches with an indexer, as TileRT keeps them; `block_tokens` is then 64.",
    )
    shards: int = Field(
        1, ge=1, le=64, description="`planes`: workers that write, each its own layers; divides tensor parallelism."
    )
    chunk_tokens: int = Field(512, ge=1, description="Most tokens of one write.")
    staging_bytes: int = Field(256 << 20, gt=0, description="Staging memory of each worker.")
    verify: bool = Field(False, description="Send a digest of every byte (test mode, slower).")
    connect_timeout_s: float = Field(2.0, gt=0, description="Longest wait for a node's control channel.")


def read_options(extra: dict[str, Any]) -> ConnectorOptions:
    """Raises ConfigError that names the key."""
    try:
        return ConnectorOptions.model_validate(extra)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["kv_connector_extra_config", *map(str, first["loc"])])
        raise ConfigError(first["msg"], where=where) from None
