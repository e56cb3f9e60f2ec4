"""Doubles for a hosted node: a TileRT without kernels that answers from its KV, and a prefill that writes planes."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from types import SimpleNamespace

import numpy as np
import torch
from pdhub_tilert.abilities import declared
from pdhub_tilert.config import TileRTNodeConfig
from pdhub_tilert.loading import TileRT, bfloat16_latents
from pdhub_tilert.planes import layouts
from pdhub_tilert.profiles import KI_PAGE_BYTES, PAGE
from pdhub_tilert.runtime import TileRTEngine

from pdhub.api import (
    Capabilities,
    EngineSpec,
    Feature,
    FirstToken,
    InvalidRequest,
    KVChunk,
    PrefillEngine,
    PrefillInfo,
    TokenLogprob,
    model_identity,
)
from pdhub.core.handoff import chunk_blocks

MODEL = {"model_type": "double", "hidden_size": 8}
LONGEST = 256
EOS = 1


def write_model(directory):
    (directory / "config.json").write_text(json.dumps(MODEL))
    return str(directory)


def planes(prompt, count, row):
    """Bytes by layer and token: ``kv`` [count, tokens, row], ``pe`` [count, tokens, 128], and pages ``ki``."""
    seed = int.from_bytes(hashlib.blake2b(repr(tuple(prompt)).encode(), digest_size=8).digest(), "big")
    rng, tokens = np.random.default_rng(seed), len(prompt)
    pages = -(-tokens // PAGE)
    kv = rng.integers(0, 0x3F, (count, tokens, row), np.uint8)
    if row == 528:
        kv[:, :, 512:] = np.frombuffer(np.ones(4, np.float32).tobytes(), np.uint8)
    pe = rng.integers(0, 0x3F, (count, tokens, 128), np.uint8)
    ki = rng.integers(0, 0x3F, (count, pages, KI_PAGE_BYTES), np.uint8)
    ki[:, :, 8192:] = np.frombuffer(np.ones(64, np.float32).tobytes(), np.uint8)
    return kv, pe, ki


def answer_of(prompt, kv, pe, ki, count):
    """Tokens that follow the KV of these planes."""
    keys = [layer[:, :8192].tobytes()[: len(prompt) * 128] for layer in ki]
    return chain(kv[:, :, :512].tobytes(), pe.tobytes(), b"".join(keys), count)


def chain(latents, rotary, keys, count):
    """Tokens: a hash chain over every byte of the KV."""
    now, out = hashlib.blake2b(latents + rotary + keys, digest_size=16).digest(), []
    for _ in range(count):
        now = hashlib.blake2b(now, digest_size=16).digest()
        out.append(100 + now[0])
    return out


def _raw(part):
    """As it lay in the landing."""
    values = part if part.shape[1] == 64 else part.to(torch.float8_e4m3fn)
    return values.view(torch.uint8).numpy().tobytes()


class Engine:
    """As TileRT's adapters behave. ``gate``: every token after the second waits for it."""

    max_seq_len = LONGEST

    def __init__(self):
        self.last_stats, self.injected, self.resets, self.seen = {}, None, 0, []
        self.gate = threading.Event()
        self.gate.set()
        self.broken = None

    def supports_ignore_eos(self):
        return True

    def inject(self, req):
        if self.broken == "inject":
            raise RuntimeError("CUDA error: 700")
        self.injected = req
        self.seen.append(req)

    def decode(self, first_token_id, max_tokens, sampling, on_token=None, cancel_event=None, grammar_session=None):
        if self.broken == "decode":
            raise RuntimeError("CUDA error: 700")
        req = self.injected
        assert req.first_token_id == first_token_id
        keys, latents, rotary = (b"".join(map(_raw, part)) for part in zip(*req.layers, strict=True))
        tokens, finish = [first_token_id], "length"
        on_token(first_token_id)
        if first_token_id == EOS and not sampling.get("ignore_eos"):
            self.last_stats = {"finish_reason": "stop"}
            return []
        for token in chain(latents, rotary, keys, max_tokens - 1):
            while not self.gate.wait(0.01) and not cancel_event.is_set():
                pass
            if cancel_event.is_set():
                finish = "cancelled"
                break
            tokens.append(token)
            on_token(token)
        self.last_stats = {"finish_reason": finish}
        return tokens

    def reset(self):
        self.resets += 1
        self.injected = None


def double(config, engine):
    def latents(rows, tokens):
        return rows[:, :512].contiguous().view(torch.float8_e4m3fn).to(torch.bfloat16)

    def keys(pages, tokens):
        return pages[:, :8192].reshape(-1, 128)[:tokens].contiguous().view(torch.float8_e4m3fn).to(torch.bfloat16)

    fp8 = config.kv_cache_dtype == "fp8_ds_mla"
    return TileRT(engine, latents if fp8 else bfloat16_latents, keys, SimpleNamespace)


class Prefill(PrefillEngine):
    def __init__(self, config, context):
        (self._layout,) = layouts(config, model_identity(MODEL))

    async def start(self):
        capabilities = Capabilities(frozenset({Feature.SAMPLING, Feature.LOGPROBS}), LONGEST, 5)
        return PrefillInfo(self._layout, capabilities, PAGE, eos_token_ids=(EOS,))

    def tokenize(self, body):
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return tuple(prompt.encode())
        if isinstance(prompt, list) and all(isinstance(t, int) and t >= 0 for t in prompt):
            return tuple(prompt)
        raise InvalidRequest("prompt must be text or token ids", param="prompt")

    def decode_text(self, token_ids):
        return ""

    async def prefill(self, request):
        prompt, layout = request.prompt_token_ids, self._layout
        if len(prompt) >= LONGEST:
            raise InvalidRequest("too long")
        whole = planes(prompt, len(layout.groups[0].layers), layout.groups[0].block_bytes // PAGE)
        for start in range(0, len(prompt), PAGE):
            stop = min(start + PAGE, len(prompt))
            data = b"".join(piece(layout, whole, start, stop, len(prompt)))
            yield KVChunk(start, stop, len(data), functools.partial(fill, data))
        yield FirstToken(66, TokenLogprob(66, -0.1, ()))

    async def close(self):
        return None


def piece(layout, whole, start, stop, tokens):
    """A chunk of one shard's planes, as :class:`pdhub.api.KVChunk` says."""
    for group, plane in zip(layout.groups, whole, strict=True):
        blocks = chunk_blocks(group, start, stop, tokens)
        for layer in range(len(group.layers)):
            for block in blocks:
                rows = plane[layer, block] if group.name == "ki" else plane[layer, block * PAGE : (block + 1) * PAGE]
                yield rows.tobytes().ljust(group.block_bytes, b"\0")


def fill(data, region):
    region.view[: len(data)] = data


def spec(engine=None):
    """Of the doubles, and the engine behind the runtime."""
    engine = engine or Engine()
    return EngineSpec(
        name="tilert-node",
        summary="",
        config=TileRTNodeConfig,
        runtime=lambda config, context: TileRTEngine(config, context, lambda c: double(c, engine)),
        prefill=Prefill,
        declares=declared,
    )
