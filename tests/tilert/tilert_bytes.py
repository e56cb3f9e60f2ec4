"""The same cache tensors through TileRT's own code and through pdhub: is every byte the same? A process of its own.

TileRT's side: its profile's ``classify_layers``, ``extract`` and ``rdma_plan``, rank by rank, the planned copies made
one by one, then its ``convert``. pdhub's side: the connector's workers, which read the same tensors in two steps, their
senders, shared memory, a real node with TileRT's engine hosted in it.

    PYTHONPATH=SITE TILERT_PD_SENDERS=8 tilert_bytes.py '[["dsv32", "fp8_ds_mla", 65, "plain"], …]'

Prints one JSON document a case. The number of shards is that of TileRT's senders, on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import torch

from pdhub import registry
from pdhub.api import model_identity
from pdhub.config.build import build_plan
from pdhub.config.models import Config
from pdhub.connector.options import ConnectorOptions
from pdhub.connector.specs import layers_of
from pdhub.connector.steps import Advance, End, Start, Step
from pdhub.connector.worker import Place, Worker
from pdhub.node.decode import NodeServer
from pdhub.wire.http import HandoffParams

SHARDS = int(os.environ["TILERT_PD_SENDERS"])
LONGEST, BLOCKS, FIRST = 512, 9, 7
TABLES = ((4, 0, 7, 2), (1, 8, 3, 5))
"""Blocks of a prompt in vLLM's two cache groups: latents, and index keys."""
ROWS = {"fp8_ds_mla": 656, "bf16": 1152}
MODEL = {"model_type": "made_up", "hidden_size": 64}


class MLAAttentionSpec:
    """vLLM's class of this name, as far as the connector reads it."""

    block_size = 64


def caches(profile, dtype, tokens, kind):
    """vLLM's cache of a prompt, as TileRT reads it and as the connector does.

    ``kind``: ``tail``: what comes after the prompt's last token is another request's. ``ue8m0``: for the connector the
    indexer's scales are exponents, as on SM100. ``damaged``: one bit of what the connector reads is another.
    """
    generator = torch.Generator().manual_seed(tokens)
    latents, keys = {}, {}
    for number in range(profile.num_layers):
        raw = torch.randint(0, 256, (BLOCKS, 64, ROWS[dtype]), dtype=torch.uint8, generator=generator)
        if kind != "tail":
            _clear(raw, TABLES[0], tokens)
        latents[f"model.layers.{number}.self_attn.attn"] = raw if dtype == "fp8_ds_mla" else raw.view(torch.bfloat16)
        if profile.ki_layer_ids is None or number in profile.ki_layer_ids:
            keys[f"model.layers.{number}.self_attn.indexer.k_cache"] = _pages(generator, tokens, kind)
    theirs = {name: page for name, (page, _) in keys.items()}
    ours = {name: page for name, (_, page) in keys.items()}
    mine = dict(latents)
    if kind == "damaged":
        name = "model.layers.3.self_attn.attn"
        mine[name] = latents[name].clone()
        mine[name].view(torch.uint8)[TABLES[0][0], tokens - 1, -1] ^= 1
    groups = [SimpleNamespace(layer_names=list(part), kv_cache_spec=MLAAttentionSpec()) for part in (latents, keys)]
    config = SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS)
    return {**latents, **theirs}, {**mine, **ours}, config


def _pages(generator, tokens, kind):
    values = torch.randint(0, 256, (BLOCKS, 64, 128), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(100, 150, (BLOCKS, 64), generator=generator)
    scales = torch.pow(2.0, exponents.double() - 127).float().view(torch.uint8).view(BLOCKS, 64, 4)
    bytes_ = exponents.to(torch.uint8).unsqueeze(-1).expand(BLOCKS, 64, 4).clone()
    if kind != "tail":
        for part in (values, scales, bytes_):
            _clear(part, TABLES[1], tokens)
    theirs, ours = (torch.empty(BLOCKS, 64, 132, dtype=torch.uint8) for _ in range(2))
    for page, own in ((theirs, scales), (ours, bytes_ if kind == "ue8m0" else scales)):
        flat = page.view(BLOCKS, -1)
        flat[:, :8192], flat[:, 8192:] = values.view(BLOCKS, -1), own.reshape(BLOCKS, -1)
    return theirs, ours


def _clear(part, table, tokens):
    block, kept = divmod(tokens, 64)
    if kept:
        part[table[block], kept:] = 0


def tilert_planes(profile, tensors, config, tokens, capacity):
    """What TileRT's receive buffer holds after its senders wrote: one tensor a shard."""
    reg = profile.classify_layers(tensors, config)
    nbytes = profile.shard_bytes(capacity, SHARDS) if SHARDS > 1 else profile.buffer_bytes(capacity)
    buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(SHARDS)]
    bases = [buffer.data_ptr() for buffer in buffers]
    layout = profile.hello_layout(bases if SHARDS > 1 else bases[0], capacity)
    hello = {"max_seq_len": capacity, **layout}
    meta = SimpleNamespace(num_tokens=tokens, block_ids_per_group=[list(table) for table in TABLES])
    for rank in range(SHARDS):
        own = torch.zeros(profile.staging_bytes(reg, rank, LONGEST, SHARDS), dtype=torch.uint8)
        staging = own if SHARDS == 1 else [own if shard == rank else None for shard in range(SHARDS)]
        sections = profile.extract(reg, meta, rank, staging, LONGEST)
        base = own.data_ptr() if SHARDS == 1 else [own.data_ptr() if shard == rank else 0 for shard in range(SHARDS)]
        for source, target, size in zip(*profile.rdma_plan(hello, sections, rank, tokens, base), strict=True):
            ctypes.memmove(target, source, size)
    return buffers


def converted(profile, buffers, capacity, tokens):
    received = SimpleNamespace(rid="r", seq_len=tokens, last_prompt_token=0, first_token_id=FIRST, sampling=None)
    buffer = buffers if SHARDS > 1 else buffers[0]
    return profile.convert(buffer, 0, capacity, received, 8).layers


class Hosted:
    """A node, and workers that fill it."""

    def __init__(self, directory, name, dtype):
        options = {"profile": name, "kv_cache_dtype": dtype, "max_seq_len": LONGEST, "engine": "stub", "shards": SHARDS}
        words = ["--kv-cache-dtype", "fp8_ds_mla" if dtype == "fp8_ds_mla" else "auto"]
        if name != "dsv32":
            words += ["--speculative-config", '{"method": "mtp"}']
        vllm = {"handoff": "pdhub", "tensor_parallel": SHARDS, "serve": {"args": words}}
        data = {
            "model": {"name": "m", "path": str(directory)},
            "handoff": {"transport": {"type": "shm"}, "verify": True},
            "prefill": [{"name": "p0", "port": 9, "launch": False, "engine": {"type": "vllm", "config": vllm}}],
            "pools": [
                {
                    "name": "tilert",
                    "engine": {"type": "tilert-node", "config": options},
                    "nodes": [{"name": "t0", "port": 0}],
                }
            ],
            "policy": {"type": "slo"},
        }
        self.plan = build_plan(Config.model_validate(data), registry.load())
        self.node = NodeServer(self.plan, "tilert", self.plan.config.pools[0].nodes[0])
        self.count = 0

    async def hand_over(self, tensors, config, tokens, *, ue8m0):
        """Returns the landing's shards, its capacity, the layers that TileRT is given, and the answer's tokens."""
        self.count += 1
        tid, engine, kept = f"t{self.count}", self.node.receiver.engine, {}
        inject = type(engine).inject

        async def keep(landing, handoff):
            await inject(engine, landing, handoff)
            kept["shards"] = [bytes(region.view) for region in landing.regions]
            kept["capacity"], kept["layers"] = landing.tokens, engine._claims[landing.id].layers

        engine.inject = keep
        workers = [self._worker(rank, tensors, config, ue8m0) for rank in range(SHARDS)]
        try:
            async with aiohttp.ClientSession(self.node.url) as http:
                body = {
                    "transfer_id": tid, "request_id": "r", "tokens": tokens, "max_tokens": 4,
                    "fingerprint": workers[0].layout.fingerprint,
                }  # fmt: skip
                claim = await _post(http, "/claim", body)
                params = HandoffParams(tid, claim["generation"], *self.node.control, claim["fingerprint"])
                for step in _steps(params, tokens):
                    for worker in workers:
                        worker.begin(step)
                        worker.computed(step)
                body = {
                    "transfer_id": tid, "generation": claim["generation"], "request_id": "r", "max_tokens": 4,
                    "prompt_token_ids": list(range(tokens)), "first_token": FIRST, "sampling": {"temperature": 0.0},
                }  # fmt: skip
                async with http.post("/decode", json=body) as reply:
                    lines = [json.loads(line) for line in (await reply.read()).splitlines()]
        finally:
            for worker in workers:
                await asyncio.to_thread(worker.close)
        if "shards" not in kept:
            raise RuntimeError(f"nothing was injected: {lines}")
        return kept["shards"], kept["capacity"], kept["layers"], [t for line in lines for t in line.get("t") or ()]

    def _worker(self, rank, tensors, config, ue8m0):
        place = Place(f"w{rank}", model_identity(MODEL), rank, SHARDS, 1, LONGEST)
        layers = {layer.name: (layer, cache) for layer, cache in layers_of(config, tensors, ue8m0=ue8m0)}
        options = ConnectorOptions(port=0, form="planes", shards=SHARDS, staging_bytes=1 << 24, verify=True)
        return Worker(options, place, layers, torch.device("cpu"), most_tokens=64)


def _steps(params, tokens):
    """A prompt that is computed in two steps, where it is long enough."""
    cut = min(100, tokens)
    tables = tuple(table[: -(-cut // 64)] for table in TABLES)
    rest = tuple(table[-(-cut // 64) : -(-tokens // 64)] for table in TABLES)
    yield Step(starts=(Start("r", params, tokens),), advances=(Advance("r", tables, True, 0, cut),))
    if cut < tokens:
        yield Step(advances=(Advance("r", rest, False, cut, tokens),))
    yield Step(ends=(End("r", True, True),))


async def _post(http, path, body):
    async with http.post(path, json=body) as reply:
        document = await reply.json()
        if reply.status != 200:
            raise RuntimeError(document)
        return document


def _different(profile, mine, theirs, capacity, tokens, *, tail):
    """Names of planes that differ. With ``tail`` the prompt's own bytes are compared, and the rest must be zero."""
    row, places = profile._kv_bpt, -(-profile.num_layers // SHARDS)
    sizes = {"kv": places * capacity * row, "pe": places * capacity * 128, "ki": places * capacity // 64 * 8448}
    at = 0
    for name, size in sizes.items():
        own, other = (torch.frombuffer(bytearray(part[at : at + size]), dtype=torch.uint8) for part in (mine, theirs))
        if tail:
            other = other * _valid(name, places, capacity, tokens, row)
        if not torch.equal(own, other):
            yield name
        at += size
    if len(mine) != at or len(theirs) != at:
        yield "size"


def _valid(name, places, capacity, tokens, row):
    token = (torch.arange(capacity) < tokens).to(torch.uint8)
    if name != "ki":
        width = row if name == "kv" else 128
        return token.view(1, -1, 1).expand(places, capacity, width).flatten()
    pages = token.view(-1, 64)
    each = torch.cat([pages.repeat_interleave(128, 1), pages.repeat_interleave(4, 1)], 1)
    return each.unsqueeze(0).expand(places, *each.shape).flatten()


def _same(mine, theirs):
    """Layers, bit for bit: what is no number may be any."""
    return len(mine) == len(theirs) and all(
        torch.equal(a.view(torch.int16), b.view(torch.int16))
        for one, other in zip(mine, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    )


async def case(directory, name, dtype, tokens, kind):
    from tilert.pd_vllm.profiles import base, mla_nsa

    profile = base.get_profile(name).configure(dtype)
    theirs_in, ours_in, config = caches(profile, dtype, tokens, kind)
    hosted = Hosted(directory, name, dtype)
    await hosted.node.start()
    try:
        mine, capacity, layers, answer = await hosted.hand_over(ours_in, config, tokens, ue8m0=kind == "ue8m0")
    finally:
        await hosted.node.close()
    theirs = tilert_planes(profile, theirs_in, config, tokens, capacity)
    raw = [buffer.numpy().tobytes() for buffer in theirs]
    different = [
        f"{plane} of shard {shard}"
        for shard, (own, other) in enumerate(zip(mine, raw, strict=True))
        for plane in _different(profile, own, other, capacity, tokens, tail=kind == "tail")
    ]
    return {
        "case": [name, dtype, tokens, kind],
        "different": different,
        "bytes": sum(map(len, mine)),
        "converted": _same(layers, converted(profile, theirs, capacity, tokens)),
        "answer": answer,
        "extraction": mla_nsa._EXTRACT_MODE,
    }


def _memory_is_here():
    """CUDA memory is host memory, and its streams are nothing."""
    from tilert_server import _on_host

    torch.Tensor.to = _on_host(torch.Tensor.to)
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.Stream = lambda *args, **kwargs: SimpleNamespace(synchronize=lambda: None)
    torch.cuda.stream = torch.cuda.device = lambda *args: contextlib.nullcontext()


async def main(cases):
    with tempfile.TemporaryDirectory() as there:
        (Path(there) / "config.json").write_text(json.dumps(MODEL))
        for one in cases:
            print(json.dumps(await case(there, *one)), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _memory_is_here()
    asyncio.run(main(json.loads(sys.argv[1])))
