"""How `pdhub up` starts a vLLM server: options that only the deployment side reads."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pdhub.api import PluginConfig


class ServeConfig(PluginConfig):
    """`serve` of a pool or of a prefill instance."""

    command: list[str] = Field(
        default_factory=lambda: ["vllm", "serve"],
        min_length=1,
        description="What starts a server; the model's path or name comes next. With another environment's vLLM: "
        "`[/opt/vllm/bin/vllm, serve]`.",
    )
    model: str | None = Field(
        None, description="What is loaded, a directory or a hub's name; default is `model.path`, else the model's name."
    )
    args: list[str] = Field(default_factory=list, description="Further arguments of `vllm serve`, after pdhub's own.")
    env: dict[str, str] = Field(default_factory=dict, description="Further environment variables; they win.")
    ready_within_s: float = Field(
        1800.0, gt=0, description="A server that has not loaded its model after that long has failed to start."
    )
    kv_buffer_device: Literal["cuda", "cpu", "xpu"] | None = Field(
        None,
        description="Where NIXL's buffers are; default is vLLM's: the device. `cpu` on a GPU stages in host memory.",
    )
    nixl_backends: list[str] = Field(
        default_factory=list, description="NIXL's backends, such as `LIBFABRIC` for EFA; default is `UCX`."
    )
    mooncake_protocol: Literal["rdma", "tcp", "efa"] = Field("rdma", description="Mooncake's transport.")
    load_failure: Literal["fail", "recompute"] = Field(
        "fail",
        description="Decode, when KV cannot be loaded: fail the request, so that the router sees it and tries again; "
        "or compute the prompt there.",
    )
    connector: str | None = Field(
        None, description="Connector class in place of vLLM's for this `handoff`, such as a patched one."
    )
    connector_module: str | None = Field(None, description="Importable module that has `connector`.")
    connector_options: dict[str, Any] = Field(
        default_factory=dict, description="Further keys of the connector's `kv_connector_extra_config`; they win."
    )
