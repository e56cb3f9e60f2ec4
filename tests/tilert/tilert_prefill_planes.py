"""A sender without a model, in a process of its own: an embedded prefill whose KV is made of the prompt.

It writes the planes of tilert_planes.py in the form that a hosted TileRT node takes. A prompt may begin with ``~``:
then computing its first chunk takes three seconds; or with ``^``, then every chunk after the first takes one.
"""

import asyncio
import functools
import json
import sys
from pathlib import Path

import tilert_planes as kv
from pdhub_tilert.config import TileRTNodeConfig
from pdhub_tilert.planes import layouts

from pdhub import registry
from pdhub.api import (
    Capabilities,
    EngineSpec,
    Feature,
    FirstToken,
    InvalidRequest,
    KVChunk,
    PluginConfig,
    PrefillEngine,
    PrefillInfo,
    TokenLogprob,
    hookimpl,
    model_identity,
)
from pdhub.config.build import load_plan
from pdhub.node.lifecycle import serve
from pdhub.node.prefill import PrefillServer

PAGE, LONGEST = 64, 256
SLOW, GAPS = ord("~"), ord("^")


class PlanesConfig(PluginConfig):
    """Nothing to choose."""


class PlanesPrefill(PrefillEngine):
    def __init__(self, config, context):
        options = TileRTNodeConfig(profile="dsv32", max_seq_len=LONGEST)
        (self._layout,) = layouts(options, identity(context.model_path))

    async def start(self):
        features = frozenset({Feature.SAMPLING, Feature.TOP_K, Feature.LOGPROBS, Feature.IGNORE_EOS})
        return PrefillInfo(self._layout, Capabilities(features, LONGEST, 5), PAGE, {}, (kv.EOS,))

    def tokenize(self, body):
        if "messages" in body:
            return tuple("".join(f"<{m['role']}>{m['content']}" for m in body["messages"]).encode())
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return tuple(prompt.encode())
        if isinstance(prompt, list) and all(isinstance(t, int) for t in prompt):
            return tuple(prompt)
        raise InvalidRequest("prompt must be text or token ids", param="prompt")

    def decode_text(self, token_ids):
        return bytes(t for t in token_ids if t < kv.EOS).decode(errors="replace")

    async def prefill(self, request):
        prompt = list(request.prompt_token_ids)
        planes = dict(zip(("kv", "pe", "ki"), kv.planes(prompt), strict=True))
        for start in range(0, len(prompt), PAGE):
            await asyncio.sleep({SLOW: 0 if start else 3, GAPS: 1 if start else 0}.get(prompt[0], 0))
            stop = min(start + PAGE, len(prompt))
            data = b"".join(self._pieces(planes, start // PAGE))
            yield KVChunk(start, stop, len(data), functools.partial(_fill, data))
        first = kv.first_of(prompt)
        asked = request.logprobs
        best = None if asked is None else TokenLogprob(first, -0.125, ((first, -0.125),)[:asked])
        yield FirstToken(first, best)

    def _pieces(self, planes, page):
        """One page of tokens: plane after plane, layer after layer."""
        for group in self._layout.groups:
            for layer in range(len(group.layers)):
                plane = planes[group.name][layer]
                rows = plane[page] if group.name == "ki" else plane[page * PAGE : (page + 1) * PAGE]
                yield rows.tobytes().ljust(group.block_bytes, b"\0")

    async def close(self):
        return None


def identity(path):
    """Of the model that prefill and nodes load."""
    return model_identity(json.loads((Path(path) / "config.json").read_text()))


def _fill(data, region):
    region.view[: len(data)] = data


@hookimpl
def pdhub_register_engines():
    return [EngineSpec(name="planes", summary="Made-up planes.", config=PlanesConfig, prefill=PlanesPrefill)]


if __name__ == "__main__":
    plan = load_plan(sys.argv[1], registry=registry.load(extra=[sys.modules[__name__]]))
    raise SystemExit(asyncio.run(serve(PrefillServer(plan, plan.config.prefill[0]), 1.0)))
