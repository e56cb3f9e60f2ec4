"""Which trees there are: a model, its servers' arguments, and the pools that stand behind one router."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One tree.

    Args:
        model: ``qwen3`` or ``deepseek`` (random, tiny) or ``smollm2``.
        pools: of :data:`HANDOFFS`.
        block: tokens of a KV block on this CPU.
        chunk: tokens that a server computes in one step; a longer prompt is computed in several.
        context: prompt plus output.
        kv: bytes of each server's KV cache.
        args: further arguments of all servers. watched: prefill instances tell KV events and ORCA headers.
        told: push: the configuration says the instance's `engine_id`; else the router learns it from its first answer.
        split_args: further arguments of the servers of a prefill and decode pair; ``whole`` does without.
    """

    model: str
    pools: tuple[str, ...]
    block: int = 128
    chunk: int = 512
    context: int = 2048
    kv: str = "128M"
    told: bool = True
    args: tuple[str, ...] = ()
    split_args: tuple[str, ...] = ()
    watched: bool = False


HANDOFFS = {"pull": "nixl", "push": "nixl_push", "mooncake": "mooncake", "whole": "none"}
"""Pool → `handoff`. ``whole`` prefills itself; its node is also the single server that others are compared with."""

KINDS = {
    # Its prefill instances are restarted: with an `engine_id` of the configuration decode would not find them again.
    "tiny": Kind("qwen3", ("pull", "push", "whole"), told=False),
    # What clients see: parsers for tools.
    "api": Kind(
        "qwen3",
        ("pull", "whole"),
        context=4096,
        args=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        watched=True,
    ),
    "mooncake": Kind("qwen3", ("mooncake", "whole")),
    "smol": Kind("smollm2", ("pull", "push", "whole"), kv="256M", watched=True),
    # On a CPU latent attention has blocks of 16, and neither chunks nor a prefix cache. vLLM's own kernel computes its
    # rotary embedding wrongly there, torch rightly (`-rotary_embedding`, below).
    "mla": Kind(
        "deepseek",
        ("pull", "whole"),
        block=16,
        chunk=2048,
        split_args=("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'),
    ),
}

SERVER_ARGS = (
    "--enforce-eager",
    "--dtype", "float32",  # bfloat16 is emulated on older CPUs, and three times slower
    "--distributed-executor-backend", "uni",  # no worker process beside the engine
    "--compilation-config", '{"custom_ops": ["-rotary_embedding"]}',
    "--disable-uvicorn-access-log",
)  # fmt: skip

SERVER_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # UCX: loopback, no search for RDMA devices; no shared memory, over which a stopped process can still be read and
    # no test could hold a transfer. NIXL: sleep between polls (tools/make_venv.py).
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "NIXL_PTHR_DELAY_US": "1000",
}
