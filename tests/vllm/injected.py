"""A node in the test's process that keeps what was injected, and what the model itself computes for the same prompt."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import torch
from pdhub_transformers.latent import LatentRow
from pdhub_transformers.rows import Storage
from pdhub_transformers.runtime import TransformersEngine
from pdhub_worlds import NODES, PDHubWorld
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pdhub.api import Handoff, Landing
from pdhub.config.build import load_plan
from pdhub.node.decode import NodeServer
from pdhub.onesided import region_bytes

KV = dict[str, Tensor]
"""What a layer's cache holds, by layer and kind: keys and values ``[head, token, dim]``, or latents and rotated keys
``[token, width]``, the first halves of all rotary pairs before the second ones."""


class Keeping(TransformersEngine):
    """Copies what was injected last, before a token is decoded."""

    kept: KV

    async def inject(self, landing: Landing, handoff: Handoff) -> None:
        await super().inject(landing, handoff)
        row = self._claim_of(landing).row
        self.kept = {name: part.clone() for name, part in _named(row, landing, handoff.prompt_tokens).items()}


def _named(row: Storage, landing: Landing, tokens: int) -> KV:
    found: KV = {}
    if not isinstance(row, LatentRow):
        for layer, (keys, values) in enumerate(row.kv[:, :, 0, :, :tokens]):
            found |= {f"{layer} keys": keys, f"{layer} values": values}
        return found
    rank, layers = row.geometry.rank, row.geometry.layers
    for layer, rows in enumerate(row.kv[:, :tokens]):
        found |= {f"{layer} latents": rows[:, :rank], f"{layer} rotated": rows[:, rank:]}
    # The engine has no use for draft layers: they are read where they arrived, their pairs still side by side.
    group = landing.layout.groups[0]
    wire = region_bytes(landing.regions[0])[: landing.layout.landing_bytes(tokens)].view(row.kv.dtype)
    blocks = wire.view(-1, len(group.layers), group.block_tokens, row.geometry.width)
    for layer in range(layers, len(group.layers)):
        rows = blocks[:, layer].flatten(0, 1)[:tokens]
        halves = torch.cat([rows[:, rank::2], rows[:, rank + 1 :: 2]], dim=-1)
        found |= {f"{layer} latents": rows[:, :rank], f"{layer} rotated": halves}
    return found


class Target:
    """The node; make it with :func:`target`."""

    def __init__(self, world: PDHubWorld, node: NodeServer, http: aiohttp.ClientSession, fingerprint: str) -> None:
        self._world, self._node, self._http, self._fingerprint = world, node, http, fingerprint

    async def hand_over(self, prompt: Sequence[int]) -> tuple[KV, int]:
        """Prefill in the tree's instance, inject here: what the engine has then, and prefill's token."""
        claim = {"transfer_id": uuid.uuid4().hex, "request_id": "test", "fingerprint": self._fingerprint}
        reply = await self._post(f"{self._node.url}/claim", claim | {"tokens": len(prompt), "max_tokens": 1})
        params = {name: reply[name] for name in ("transfer_id", "generation", "host", "port", "fingerprint")}
        body = {"model": "m", "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        body["kv_transfer_params"] = {"pdhub": params}
        answer = await self._post(f"{self._world.prefill.url}/v1/completions", body)
        first = answer["choices"][0]["token_ids"][0]
        decode = {"prompt_token_ids": list(prompt), "first_token": first, "max_tokens": 1, "request_id": "test"}
        decode |= {"transfer_id": params["transfer_id"], "generation": params["generation"]}
        await self._post(f"{self._node.url}/decode", decode)
        engine = self._node.receiver.engine
        assert isinstance(engine, Keeping)
        return engine.kept, first

    async def _post(self, url: str, body: Any) -> Any:
        async with self._http.post(url, json=body) as reply:
            text = await reply.text()
            assert reply.status == 200, f"{url}: {reply.status} {text}\n{self._world.log()}"
            lines = [json.loads(line) for line in text.splitlines()]
            assert not any("error" in line for line in lines), text
            return lines[0]


@asynccontextmanager
async def target(world: PDHubWorld) -> AsyncIterator[Target]:
    """A node with the tree's configuration, beside the one that it has."""
    plan = load_plan(world.path)
    engine = plan.pools[NODES]
    spec = replace(engine.spec, runtime=lambda config, context: Keeping(config, context))
    pool = next(pool for pool in plan.config.pools if pool.name == NODES)
    own = pool.nodes[0].model_copy(update={"name": "kept", "port": 0, "control_port": 0})
    node = NodeServer(replace(plan, pools={NODES: replace(engine, spec=spec)}), NODES, own)
    await node.start()
    try:
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(world.prefill_told) as reply:
            yield Target(world, node, http, (await reply.json())["fingerprint"])
    finally:
        await node.close()


class Own:
    """What transformers computes, and with the weights of the draft layers, which it does not load, plain torch."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=torch.float32).eval()
        self._directory = directory

    @torch.inference_mode()
    def kv(self, prompt: Sequence[int], first: int) -> KV:
        """Of a prompt and the token that follows it."""
        out = self._model(torch.tensor([list(prompt)]), use_cache=True, output_hidden_states=True)
        names = ("latents", "rotated") if hasattr(self._model.config, "kv_lora_rank") else ("keys", "values")
        found: KV = {}
        for number, layer in enumerate(out.past_key_values.layers):
            parts = (layer.keys[0], layer.values[0])
            if names[0] == "latents":
                parts = (parts[0][0], parts[1][0])
            found |= {f"{number} {name}": part for name, part in zip(names, parts, strict=True)}
        return found | self._drafts([*prompt[1:], first], out.hidden_states[-1][0])

    def _drafts(self, following: Sequence[int], hidden: Tensor) -> KV:
        """The first draft layer's, as DeepSeek-V3 defines it: it sees each token's successor beside its state."""
        config = json.loads((self._directory / "config.json").read_text())
        if not config.get("num_nextn_predict_layers"):
            return {}
        number = config["num_hidden_layers"]
        weights = load_file(self._directory / "model.safetensors")

        def weight(name: str) -> Tensor:
            return weights[f"model.layers.{number}.{name}.weight"]

        def norm(rows: Tensor, name: str) -> Tensor:
            scale = rows.pow(2).mean(-1, keepdim=True).add(config["rms_norm_eps"]).rsqrt()
            return rows * scale * weight(name)

        embedded = weight("embed_tokens")[torch.tensor(following)]
        embedded[0] = 0  # as vLLM has it: nothing is drafted there
        both = torch.cat([norm(embedded, "enorm"), norm(hidden, "hnorm")], dim=-1) @ weight("eh_proj").T
        row = norm(both, "input_layernorm") @ weight("self_attn.kv_a_proj_with_mqa").T
        rank, width = config["kv_lora_rank"], config["qk_rope_head_dim"]
        places = torch.arange(len(following))[None]
        cos, sin = (part[0, :, : width // 2] for part in self._model.model.rotary_emb(hidden[None], places))
        a, b = row[:, rank::2], row[:, rank + 1 :: 2]
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        latents = norm(row[:, :rank], "self_attn.kv_a_layernorm")
        return {f"{number} latents": latents, f"{number} rotated": rotated}


def worst(found: KV, wanted: KV) -> tuple[float, str]:
    """The largest difference between two caches of the same layers, in units of the largest value there, and where.

    Keys of the deeper layers are in the tens: what the order of additions changes there is as much larger."""
    assert found.keys() == wanted.keys(), f"{sorted(found)} and {sorted(wanted)}"
    for name, part in found.items():
        assert part.shape == wanted[name].shape, f"{name}: {part.shape} and {wanted[name].shape}"
    return max(
        (float((part - wanted[name]).abs().max() / wanted[name].abs().max()), name) for name, part in found.items()
    )
