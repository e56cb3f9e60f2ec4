"""Options of a pool or a prefill instance. Light: no vllm."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from pdhub.api import Feature, PluginConfig
from pdhub_vllm.operate_config import ServeConfig


class Handoff(StrEnum):
    """How KV moves from prefill to decode. ``NIXL``: decode pulls. ``NIXL_PUSH``: prefill pushes, both legs at once.
    ``MOONCAKE``: as push, with a bootstrap server. ``PDHUB``: prefill streams to nodes of `pdhub node`, and to no vLLM.
    ``NONE``: no disaggregation."""

    NIXL = "nixl"
    NIXL_PUSH = "nixl_push"
    MOONCAKE = "mooncake"
    PDHUB = "pdhub"
    NONE = "none"


class KVEventsConfig(PluginConfig):
    """Where one server publishes its KV events: `--kv-events-config` of vLLM."""

    endpoint: str = Field(
        pattern=r"^(tcp://[^/*]+:[1-9][0-9]*|ipc://.+)$",
        description="Its publisher as routers reach it, `tcp://host:port`; rank N of data parallelism adds N.",
    )
    replay: str | None = Field(
        None,
        pattern=r"^(tcp://[^/*]+:[1-9][0-9]*|ipc://.+)$",
        description="Its `replay_endpoint`. Without one, what was stored before the router started, or while events "
        "were lost, stays unknown.",
    )
    topic: str = Field("", description="Its `topic`.")


class VLLMConfig(PluginConfig):
    """`engine: {type: vllm, config: …}` of a pool or of a prefill instance.

    A pool and the prefill instances that serve it have the same `handoff`. The options from `engine_id` on say where a
    prefill instance's connector listens; pools do not read them.
    """

    handoff: Handoff = Field(
        Handoff.NIXL,
        description="`nixl` (pull), `nixl_push`, `mooncake`, `pdhub` (an instance that prefills only for nodes of "
        "`pdhub node`), or `none`: aggregated.",
    )
    model: str | None = Field(None, description="`--served-model-name`; default is the served model's name.")
    slots: int = Field(256, ge=1, description="Requests sent to one node at once; more wait in the router's queue.")
    max_context: int | None = Field(
        None, gt=0, description="Prompt plus output in tokens; default is what `/v1/models` says."
    )
    max_logprobs: int = Field(20, ge=0, description="`--max-logprobs` of the servers.")
    features: list[Feature] | None = Field(
        None, description="What a node can do; default is all that vLLM can do with this `handoff`."
    )
    lease_s: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="How long a prompt's KV waits for its decode call: `kv_lease_duration` of NIXL (default 30), "
        "`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT` of Mooncake (default 45; vLLM's own is 480).",
    )
    metrics: bool = Field(
        True, description="Read the load from `/metrics`; without it only the router's own count is known."
    )
    server_load: bool = Field(
        False,
        description="Read `/load` in place of `/metrics` (needs `--enable-server-load-tracking`): cheaper, but one "
        "number, requests running or waiting.",
    )
    orca: bool = Field(
        False,
        description="Ask for an ORCA header with every answer that is not streamed: waiting requests and use of the KV "
        "cache, newer than the last probe's.",
    )
    kv_events: dict[str, KVEventsConfig] = Field(
        default_factory=dict,
        description="By the name of a node or prefill instance: where its server publishes what its prefix cache has. "
        "Needs `pip install 'pdhub-vllm[kv-events]'`.",
    )
    engine_id: str | None = Field(
        None,
        description="Push: fixed `engine_id` of the instance's transfer config. Without it both legs run one after the "
        "other until an answer has told it. With it decode nodes must be restarted after the instance was.",
    )
    side_channel_host: str | None = Field(
        None, description="Push: `VLLM_NIXL_SIDE_CHANNEL_HOST` of the instance; default is its `host`."
    )
    side_channel_port: int = Field(
        5600, ge=1, le=65_535, description="Push: `VLLM_NIXL_SIDE_CHANNEL_PORT`; rank N of data parallelism adds N."
    )
    tensor_parallel: int = Field(1, ge=1, description="Push: `--tensor-parallel-size` of the instance.")
    pipeline_parallel: int = Field(1, ge=1, description="Push: `--pipeline-parallel-size` of the instance.")
    data_parallel: int = Field(
        1, ge=1, description="Push, Mooncake: ranks behind the instance's one address; the router names one a request."
    )
    bootstrap_port: int = Field(
        8998, ge=1, le=65_535, description="Mooncake: `VLLM_MOONCAKE_BOOTSTRAP_PORT` of the instance."
    )
    bootstrap_url: str | None = Field(
        None,
        pattern=r"^http://[^/?#@]+$",
        description="Mooncake: an external bootstrap server, `http://host:port`; default is the instance's own.",
    )
    pdhub_port: int | None = Field(
        None,
        ge=1,
        le=65_535,
        description="Where pdhub's connector in a prefill instance tells routers its KV layout; rank N of data "
        "parallelism adds N. Default 5580 with `handoff: pdhub`; an instance that serves nodes of `pdhub node` beside "
        "vLLM's own hand-over names one.",
    )
    serve: ServeConfig = Field(default_factory=ServeConfig, description="How `pdhub up` starts the servers.")

    @property
    def connector_port(self) -> int | None:
        """Of pdhub's connector in a prefill instance; None = it has none."""
        return self.pdhub_port or (5580 if self.handoff is Handoff.PDHUB else None)
