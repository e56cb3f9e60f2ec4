"""TileRT's own adapter, MTP on, around kernels that are written down instead of run; hosted as `pdhub node` hosts it.

Prints what the kernels were asked for and what came out, as one JSON document.
"""

import asyncio
import json
import tempfile
import threading
from pathlib import Path

import torch
from hosted_world import write_model
from pdhub_tilert import loading
from pdhub_tilert.config import TileRTNodeConfig
from pdhub_tilert.runtime import TileRTEngine
from tilert.pd_vllm.profiles.mla_nsa import MlaNsaEngineAdapter
from tilert_prefill_planes import LONGEST, PlanesConfig, PlanesPrefill
from tilert_server import _on_host

from pdhub.api import EngineSpec, RequestCancelled
from pdhub.testing.drive import EngineDriver

STOP = 900


class Kernels:
    """The members of TileRT's decode layer that its adapter uses. A step accepts three tokens, counted from 1000."""

    max_seq_len = LONGEST

    def __init__(self, calls):
        self.calls, self.next, self.stop_at = calls, 1000, None
        self.going_on = threading.Event()  # before the third call of an answer
        self.going_on.set()

    def set_prefill_valid_tokens(self, count):
        self.calls.append(["valid", count])

    def show_hands(self, draft, steps):
        if self.next > 1003:
            self.going_on.wait(60)
        self.calls.append(["show_hands", draft.flatten().tolist(), steps])
        self._steps = steps
        tokens = range(self.next, self.next + 3 * steps)
        self._tokens = [STOP if token == self.stop_at else token for token in tokens]
        self.next += 3 * steps

    def ar_accepted_tokens(self, device):
        return torch.tensor([[len(self._tokens), *self._tokens]])

    def ar_num_accepted(self, device):
        return torch.tensor([[self._steps, *[3] * self._steps]])

    def get_next_draft_tokens(self, device):
        return torch.tensor([1, 2, 3, 4], dtype=torch.int32)

    def reset_sequence(self):
        self.calls.append(["reset"])


class Generator:
    mtp_seq_len, stop_token_ids = 4, (STOP,)

    def __init__(self):
        self.calls = []
        self.decode_layer = Kernels(self.calls)

    def inject_cache(self, layers, start_pos):
        self.calls.append(["inject", len(layers), [list(part.shape) for part in layers[0]], start_pos])

    def set_cur_pos(self, position):
        self.calls.append(["position", position])

    def update_sampling_params(self, **params):
        self.calls.append(["sampling", params])


async def main(directory):
    generator = Generator()

    def load(config):
        stub = loading.load(config.model_copy(update={"engine": "stub"}))
        return loading.TileRT(MlaNsaEngineAdapter(generator, config.mtp), stub.latents, stub.keys, stub.request)

    spec = EngineSpec(
        name="tilert-node",
        summary="",
        config=PlanesConfig,
        runtime=lambda config, context: TileRTEngine(config, context, load),
        prefill=PlanesPrefill,
    )
    config = TileRTNodeConfig(profile="dsv32", max_seq_len=LONGEST, mtp=True)
    driver = EngineDriver(spec, config, str(write_model(directory / "model")))
    await driver.start()
    out = {"features": sorted(driver.info.capabilities.features), "context": driver.info.capabilities.max_context}
    prompt = tuple(b"a prompt of more than one page " * 3)
    for name, stop_at in (("whole", None), ("stopped", 1007)):
        generator.calls.clear()
        generator.decode_layer.next, generator.decode_layer.stop_at = 1000, stop_at
        answer = await driver.answer(prompt, 12)
        end = answer.finished[0]
        out[name] = {
            "calls": list(generator.calls),
            "tokens": answer.tokens,
            "end": [end.reason, end.completion_tokens],
        }
    generator.decode_layer.next, generator.decode_layer.stop_at = 1000, None
    generator.decode_layer.going_on.clear()
    received = await driver.receive(prompt)
    await driver.inject(received)
    request = driver.request(received, 150)
    stream = driver.stream(received, request)
    await anext(stream)
    driver.engine.cancel(request.transfer_id)
    generator.decode_layer.going_on.set()
    try:
        while True:
            await anext(stream)
    except (RequestCancelled, StopAsyncIteration) as error:
        out["cancelled"] = type(error).__name__
    driver.engine.release(received.landing)
    await driver.close()
    print(json.dumps(out))


if __name__ == "__main__":
    torch.full = _on_host(torch.full)
    with tempfile.TemporaryDirectory() as there:
        asyncio.run(main(Path(there)))
