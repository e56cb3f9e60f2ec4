"""The exact command and environment of one vLLM server."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping

from pdhub.api import NodeSpec, Process, Topology
from pdhub_vllm.config import Handoff, KVEventsConfig, VLLMConfig
from pdhub_vllm.operate_ports import config_of, side_channel_host, side_channels
from pdhub_vllm.operate_transfer import consumer, lease_of, producer


def process(node: NodeSpec, topology: Topology) -> Process:
    """How one server is started."""
    config = config_of(node)
    return Process(
        argv=tuple(_argv(node, config, topology)),
        env=_environment(node, config, topology),
        secrets={"VLLM_API_KEY": node.api_key_env} if node.api_key_env else {},
        ready_url=f"{node.url}/health",
        ready_within_s=config.serve.ready_within_s,
    )


def shell(process: Process) -> str:
    """The same as a line that a shell runs; API keys stay names of variables."""
    words = [f"{name}={shlex.quote(value)}" for name, value in process.env.items()]
    words += [f'{name}="${source}"' for name, source in process.secrets.items()]
    lines = [*words, " ".join(map(shlex.quote, _head(process.argv)))]
    rest = process.argv[len(_head(process.argv)) :]
    place = 0
    while place < len(rest):
        takes = place + 1 < len(rest) and not rest[place + 1].startswith("-")
        lines.append("  " + " ".join(map(shlex.quote, rest[place : place + 1 + takes])))
        place += 1 + takes
    return " \\\n".join(lines)


def _head(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command and its model."""
    first = next((i for i, word in enumerate(argv) if word == "--served-model-name"), len(argv))
    return argv[:first]


def _argv(node: NodeSpec, config: VLLMConfig, topology: Topology) -> list[str]:
    argv = [
        *config.serve.command,
        config.serve.model or topology.model_path or topology.model,
        "--served-model-name", config.model or topology.model,
        "--host", node.host,
        "--port", str(node.port),
    ]  # fmt: skip
    sizes = {
        "--tensor-parallel-size": config.tensor_parallel,
        "--pipeline-parallel-size": config.pipeline_parallel,
        "--data-parallel-size": config.data_parallel,
    }
    for flag, size in sizes.items():
        if size > 1:
            argv += [flag, str(size)]
    if config.max_context is not None:
        argv += ["--max-model-len", str(config.max_context)]
    argv += ["--max-logprobs", str(config.max_logprobs)]
    if node.role != "prefill":
        # A decode request that queues in vLLM lets its prompt's KV expire: the router is to hold it back.
        argv += ["--max-num-seqs", str(config.slots)]
    argv += ["--enable-prompt-tokens-details"]
    if config.server_load:
        argv += ["--enable-server-load-tracking"]
    if (events := config.kv_events.get(node.name)) is not None:
        argv += ["--kv-events-config", json.dumps(_publisher(events))]
    transfer = producer(node, config) if node.role == "prefill" else consumer(config)
    if transfer is not None:
        argv += ["--kv-transfer-config", json.dumps(transfer)]
    return [*argv, *config.serve.args]


def _publisher(events: KVEventsConfig) -> dict[str, object]:
    """vLLM listens where its endpoint has a star; its replay endpoint it always listens on."""
    listens = {"endpoint": events.endpoint, "replay_endpoint": events.replay}
    addresses = {name: re.sub(r"^tcp://.*:", "tcp://*:", at) for name, at in listens.items() if at is not None}
    return {"enable_kv_cache_events": True, "publisher": "zmq", "topic": events.topic, **addresses}


def _environment(node: NodeSpec, config: VLLMConfig, topology: Topology) -> Mapping[str, str]:
    env: dict[str, str] = {}
    port = side_channels(topology).get(node.name)
    if port is not None:
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = side_channel_host(node, config)
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    if config.handoff is Handoff.MOONCAKE:
        env["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = str(max(1, round(lease_of(config))))
        if node.role == "prefill":
            env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(config.bootstrap_port)
    if node.threads:
        env["OMP_NUM_THREADS"] = str(node.threads)
    return {**env, **config.serve.env}
