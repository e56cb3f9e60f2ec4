"""The exact command of one decode server, and the connector that its prefill instances need."""

from __future__ import annotations

from typing import Any, Final

from pdhub.api import NodeSpec, Process, Topology
from pdhub_tilert.client import control_of
from pdhub_tilert.config import TileRTConfig
from pdhub_tilert.profiles import Profile

ENGINE: Final = "tilert"
CONNECTOR: Final = "TileRTConnector"


def config_of(node: NodeSpec) -> TileRTConfig:
    """A node's options, typed."""
    return TileRTConfig.model_validate(dict(node.config))


def ours(topology: Topology) -> list[tuple[NodeSpec, TileRTConfig]]:
    """Decode servers of the topology."""
    return [(node, config_of(node)) for node in topology.nodes if node.engine == ENGINE]


def shards(config: TileRTConfig) -> int:
    """Devices of the receive buffer. TileRT's NIXL transport writes to the last one that it registered."""
    return config.serve.shards or (1 if config.transport == "nixl" else 8)


def senders(config: TileRTConfig) -> int:
    """Prefill ranks that write."""
    return config.serve.senders or (1 if config.transport == "nixl" else 8)


def environment(config: TileRTConfig) -> dict[str, str]:
    """What both ends must be told alike."""
    env = {"TILERT_PD_SHARDS": str(shards(config)), "TILERT_PD_SENDERS": str(senders(config))}
    if config.serve.probe_address:
        env["TILERT_PD_PROBE_ADDR"] = config.serve.probe_address
    if config.profile is Profile.GLM5 and not config.mtp:
        env["TILERT_PD_NO_MTP"] = "1"
    return env


def process(node: NodeSpec) -> Process:
    """How one decode server is started."""
    config = config_of(node)
    serve = config.serve
    _, control = control_of(config, node.url)
    argv = [
        serve.python, "-m", "tilert.pd_vllm.decode_server",
        "--engine", serve.engine,
        "--model", config.profile.value,
        "--max-seq-len", str(config.max_seq_len),
        "--kv-cache-dtype", config.kv_cache_dtype.value,
        "--transport", config.transport,
        "--ctrl-port", str(control),
        "--http-port", str(node.port),
        "--pd-buffer-device", serve.buffer_device,
    ]  # fmt: skip
    if serve.weights_dir:
        argv += ["--model-weights-dir", serve.weights_dir]
    if config.mtp:
        argv.append("--with-mtp")
    env = {**environment(config), "TILERT_DECODE_POLL_MS": str(serve.poll_ms), **serve.env}
    return Process(
        argv=(*argv, *serve.args), env=env, ready_url=f"{node.url}/health", ready_within_s=serve.ready_within_s
    )


def child(config: TileRTConfig) -> dict[str, Any]:
    """TileRT's connector, for a prefill instance's transfer config.

    Where a request's KV goes is said with the request, so that one connector serves all nodes of a pool.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "tilert.pd_vllm.prefill_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "tilert_model": config.profile.value,
            "tilert_max_seq_len": config.max_seq_len,
            "tilert_transport": config.transport,
        },
    }
