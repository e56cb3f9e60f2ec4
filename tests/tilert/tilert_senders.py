"""Hand over the same requests by TileRT's own connector, or by ours: ``tilert_senders.py stock|synthetic PORT LONGEST``

Requests come as JSON on standard input: ``id`` as vLLM's engine has it, ``prompt``, ``repetition_penalty``. They go
one after the other. ``stock`` needs Python 3.12, vLLM and TileRT: its ``TileRTConnector`` runs unchanged, both of its
sides, on caches laid out as vLLM does; stood in for is where memory lies (tilert_server.py), and CUDA's streams.
"""

import contextlib
import json
import os
import socket
import sys
import threading
from types import SimpleNamespace

import numpy as np
from tilert_planes import LAYERS, PAGE, planes

WITHIN_S = 60


def synthetic(requests, port, longest):
    from tilert_connector import Connector

    connector = Connector(longest)
    for request in requests:
        with contextlib.suppress(AssertionError):  # as the stock one: what a hello says may end a request
            connector.send(
                request["id"], request["prompt"], "127.0.0.1", port, repetition_penalty=request["repetition_penalty"]
            )


def stock(requests, port, longest):
    import torch

    device_is_here(torch)
    from tilert.pd_vllm import transport
    from tilert.pd_vllm.prefill_connector import TileRTConnector
    from tilert_server import memory_is_here
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    memory_is_here(transport)
    one_rank()
    extra = {"tilert_model": "dsv32", "tilert_transport": "nixl", "tilert_max_seq_len": longest}
    transfer = KVTransferConfig(
        kv_connector="TileRTConnector",
        kv_connector_module_path="tilert.pd_vllm.prefill_connector",
        kv_role="kv_producer",
        kv_connector_extra_config=extra,
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(max_model_len=longest),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    caches = Caches(torch, -(-longest // PAGE) + 3)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(caches.layers))])
    scheduler = TileRTConnector(config, KVConnectorRole.SCHEDULER, groups)
    worker = TileRTConnector(config, KVConnectorRole.WORKER, groups)
    worker.register_kv_caches(caches.layers)
    sent, send = threading.Event(), worker._send_pipelined

    def watched(job):
        try:
            send(job)
        finally:
            sent.set()

    worker._send_pipelined = watched
    for request in requests:
        blocks = caches.fill(request["prompt"])
        meta = scheduler.build_connector_meta(step_of(request, blocks, port))
        assert len(meta.requests) == 1, "it did not claim the request"
        worker.bind_connector_metadata(meta)
        for layer in caches.layers:
            worker.save_kv_layer(layer, None, None)
        worker.wait_for_save()
        worker.clear_connector_metadata()
        assert sent.wait(WITHIN_S)
        sent.clear()


class Caches:
    """vLLM's caches of DeepSeek-V3.2, fp8_ds_mla: by layer, block and token 656 bytes; the indexer's 132."""

    def __init__(self, torch, blocks):
        self._blocks = blocks
        self.layers = {}
        for n in range(LAYERS):
            self.layers[f"model.layers.{n}.self_attn.attn"] = torch.zeros((blocks, PAGE, 656), dtype=torch.uint8)
            self.layers[f"model.layers.{n}.self_attn.indexer.k_cache"] = torch.zeros(
                (blocks, PAGE, 132), dtype=torch.uint8
            )

    def fill(self, prompt):
        """Put a prompt's KV there, into blocks out of order. Returns their ids."""
        kv, pe, ki = planes(prompt)
        blocks = np.random.default_rng(len(prompt)).permutation(self._blocks)[: ki.shape[1]].tolist()
        names = iter(self.layers.values())
        for n, (rows, pages) in enumerate(zip(names, names, strict=True)):
            for at, block in enumerate(blocks):
                part = np.concatenate([plane[n, at * PAGE : (at + 1) * PAGE] for plane in (kv, pe)], axis=1)
                rows.numpy()[block, : len(part)] = part
                pages.numpy()[block] = ki[n, at].reshape(PAGE, 132)
        return blocks


def step_of(request, blocks, port):
    """What vLLM's scheduler says in the step that computes a whole prompt."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    params = {"tilert_host": "127.0.0.1", "tilert_ctrl_port": port}
    new = NewRequestData(
        req_id=request["id"],
        prompt_token_ids=request["prompt"],
        mm_features=[],
        sampling_params=SamplingParams(
            max_tokens=1,
            repetition_penalty=request["repetition_penalty"],
            extra_args={"kv_transfer_params": params},
        ),
        pooling_params=None,
        block_ids=(blocks,),
        num_computed_tokens=0,
        lora_request=None,
    )
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [new]
    step.num_scheduled_tokens = {request["id"]: len(request["prompt"])}
    return step


def one_rank():
    """vLLM's groups of one process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel()


def device_is_here(torch):
    """The host is the one device; what is copied on it is there when the call returns."""

    class Event:
        def record(self, *_):
            pass

        def synchronize(self):
            pass

    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda *_: None
    torch.cuda.device = torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.Event = Event


def main():
    kind, port, longest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    {"stock": stock, "synthetic": synthetic}[kind](json.load(sys.stdin), port, longest)
    sys.stderr.flush()
    os._exit(0)  # exit handlers of NIXL's libraries crash on some machines


if __name__ == "__main__":
    main()
