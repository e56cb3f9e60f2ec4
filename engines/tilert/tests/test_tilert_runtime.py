"""The hosted node without TileRT: the engines' kit, and what is special about this one."""

import asyncio

import pytest
from hosted_double import EOS, LONGEST, Engine, answer_of, planes, spec, write_model
from pdhub_tilert.config import TileRTNodeConfig
from pdhub_tilert.loading import load
from pdhub_tilert.planes import layouts, rounded
from pdhub_tilert.profiles import KVDtype, Profile, indexers, kv_bytes, layers
from pdhub_tilert.runtime import TileRTEngine

from pdhub.api import (
    ConfigError,
    EngineContext,
    EngineFailed,
    FinishReason,
    InvalidRequest,
    PluginError,
    RequestCancelled,
    Sampling,
    TransferFailed,
)
from pdhub.connector.planes import layout_of
from pdhub.testing import EngineConformance
from pdhub.testing.drive import EngineDriver
from pdhub.testing.memory import MemoryTransport

OPTIONS = {"profile": "dsv32", "max_seq_len": 512}


class TestHosted(EngineConformance):
    @pytest.fixture
    def spec(self):
        return spec()

    @pytest.fixture
    def options(self):
        return OPTIONS

    @pytest.fixture
    def model_path(self, tmp_path):
        return write_model(tmp_path)

    def reference(self, prompt, max_tokens):
        return [66, *answer_of(prompt, *planes(prompt, 61, 528), max_tokens - 1)]


@pytest.fixture
async def driver(tmp_path):
    engine = Engine()
    made = EngineDriver(spec(engine), TileRTNodeConfig(**OPTIONS), write_model(tmp_path))
    await made.start()
    made.double = engine
    yield made
    await made.close()


@pytest.mark.parametrize("profile", list(Profile))
@pytest.mark.parametrize("dtype", list(KVDtype))
@pytest.mark.parametrize("shards", [1, 8])
def test_the_layout_is_what_the_connector_writes_and_as_big_as_tilerts_buffer(profile, dtype, shards):
    config = TileRTNodeConfig(profile=profile, kv_cache_dtype=dtype, shards=shards)
    count, row, name = layers(profile, True), *{"fp8_ds_mla": (528, "fp8_ds_mla"), "bf16": (1024, "bfloat16")}[dtype]
    found = layouts(config, "m")
    wanted = [
        layout_of(count, own, row, name, model="m", shards=shards).fingerprint for own in indexers(profile, mtp=True)
    ]
    assert [layout.fingerprint for layout in found] == wanted
    places = -(-count // shards)
    assert found[0].landing_bytes(256) == places * (256 * (row + 128) + 4 * 8448)
    if shards == 1:
        assert found[0].landing_bytes(256) == kv_bytes(profile, dtype, True, 256)


def test_which_layers_have_an_indexer():
    assert indexers(Profile.DSV32, mtp=True) == (tuple(range(61)),)
    assert len(indexers(Profile.GLM5, mtp=False)[0]) == 78
    full, without = indexers(Profile.GLM5_2, mtp=True)
    assert full[:5] == (0, 1, 2, 6, 10)
    assert (full[-2:], without[-1]) == ((74, 78), 74)


@pytest.mark.parametrize(("tokens", "whole"), [(1, 64), (64, 64), (65, 128)])
def test_landings_are_whole_pages(tokens, whole):
    assert rounded(tokens) == whole


async def test_tilert_is_told_what_its_own_server_tells_it(driver):
    prompt = (5, 6, 7)
    answer = await driver.answer(prompt, 4, sampling=Sampling(0.8, 0.9, 40), ignore_eos=True)
    assert answer.finished[0].reason is FinishReason.LENGTH
    (seen,) = driver.double.seen
    assert (seen.seq_len, seen.last_prompt_token, seen.first_token_id) == (3, 7, 66)
    assert seen.sampling == {
        "temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "ignore_eos": True,
    }  # fmt: skip
    assert [tuple(part.shape) for part in seen.layers[0]] == [(3, 128), (3, 512), (3, 64)]
    assert driver.double.resets == 1
    assert driver.info.capabilities.max_context == LONGEST - 1


async def test_a_first_token_that_ends_the_answer(driver):
    received = await driver.receive((5, 6))
    answer = await driver.decode(received, driver.request(received, 4, first_token=EOS))
    assert (answer.tokens, answer.finished[0].reason, answer.finished[0].stop_token) == ([EOS], FinishReason.STOP, EOS)


async def test_the_next_kv_arrives_while_one_request_holds_the_engine(driver):
    first, prompt = await driver.receive((5, 6)), (8, 9) * 40
    await driver.inject(first)
    driver.double.gate.clear()
    stream = driver.stream(first, driver.request(first, 6))
    head = await anext(stream)
    second = await driver.receive(prompt)
    assert driver.engine.load().kv_usage == 1.0
    driver.double.gate.set()
    rest = [item async for item in stream]
    driver.engine.release(first.landing)
    assert head.token_ids[0] == 66
    assert rest[-1].completion_tokens == 6
    answer = await driver.decode(second, driver.request(second, 5))
    assert answer.tokens == [66, *answer_of(prompt, *planes(prompt, 61, 528), 4)]


async def test_cancelled_before_tilert_began_it_never_begins(driver):
    first = await driver.receive((5, 6))
    await driver.inject(first)
    request = driver.request(first, 6)
    stream = driver.stream(first, request)
    driver.double.gate.clear()
    blocked = asyncio.get_running_loop().run_in_executor(driver.engine._thread, driver.double.gate.wait)
    head = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    driver.engine.cancel(request.transfer_id)
    driver.double.gate.set()
    await blocked
    with pytest.raises(RequestCancelled):
        await head
    assert driver.double.seen == []


@pytest.mark.parametrize("broken", ["inject", "decode"])
async def test_a_failure_of_the_engine_ends_one_request(driver, broken):
    driver.double.broken = broken
    received = await driver.receive((5, 6))
    with pytest.raises(EngineFailed) as caught:
        await driver.decode(received, driver.request(received, 4))
    assert "CUDA" not in caught.value.message
    driver.double.broken = None
    assert (await driver.answer((5, 6), 4)).finished


async def test_a_prompt_of_another_length_is_not_decoded(driver):
    received = await driver.receive((5, 6))
    await driver.inject(received)
    with pytest.raises(TransferFailed):
        await anext(driver.stream(received, driver.request(received, 4, prompt_token_ids=(5, 6, 7))))
    with pytest.raises(InvalidRequest):
        await anext(driver.stream(received, driver.request(received, 4, sampling=Sampling(0.5, 1.0, 300))))
    driver.engine.release(received.landing)


async def test_what_keeps_a_node_from_starting_says_what_to_do(tmp_path):
    def engine(path, **options):
        return TileRTEngine(TileRTNodeConfig(**options), EngineContext(MemoryTransport(), 0, path), load)

    for path, kind in ((None, ConfigError), (str(tmp_path / "none"), ConfigError)):
        one = engine(path)
        with pytest.raises(kind, match=r"model\.path"):
            await one.start()
        await one.close()
    pytest.importorskip("torch")
    try:
        import tilert  # noqa: F401
    except ImportError:
        one = engine(write_model(tmp_path), engine="stub")
        with pytest.raises(PluginError, match="TileRT cannot be imported"):
            await one.start()
        await one.close()
