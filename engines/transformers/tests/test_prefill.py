"""The embedded prefill: chunks, the first token, refusals and stopping."""

from __future__ import annotations

import pytest
import torch
from pdhub_transformers import prefill
from support import Plain, prompt_of, running

from pdhub.api import FirstToken, InvalidRequest, KVChunk, PrefillRequest, Sampling


async def collect(driver, prompt, **changes):
    """KV bytes of all chunks, their borders, and the first token."""
    data, borders, first = b"", [], None
    async for item in driver.prefill.prefill(PrefillRequest("t", "r", tuple(prompt), Sampling(0.0), **changes)):
        if isinstance(item, FirstToken):
            first = item
            continue
        region = driver.transport.allocate(item.nbytes)
        item.write_into(region)
        data += bytes(region.view)
        borders.append((item.start, item.stop))
        driver.transport.unregister(region.id)
    return data, borders, first


@pytest.mark.parametrize("length", [15, 16, 17, 33, 48, 50])
async def test_chunks_equal_one_pass(llama_dir, length):
    async with running(llama_dir) as whole, running(llama_dir, chunk_tokens=16) as parts:
        one, borders_one, first_one = await collect(whole, prompt_of(length))
        many, borders, first = await collect(parts, prompt_of(length))
    assert borders_one == [(0, length)]
    assert borders == [(start, min(start + 16, length)) for start in range(0, length, 16)]
    assert first == first_one
    assert len(one) == len(many) == whole.prefill_info.layout.landing_bytes(length)
    pair = [torch.frombuffer(bytearray(data), dtype=torch.float32) for data in (one, many)]
    assert torch.allclose(*pair, atol=1e-4)


async def test_the_first_token_is_the_models(llama_dir):
    plain, prompt = Plain(llama_dir), prompt_of(40)
    async with running(llama_dir) as driver:
        _, _, first = await collect(driver, prompt, logprobs=2)
        best = plain.logits(prompt)[-1].log_softmax(-1).topk(2)
        assert first.token_id == plain.greedy(prompt, 1)[0]
        assert [token for token, _ in first.logprob.top] == best.indices.tolist()
        assert first.logprob.logprob == pytest.approx(float(best.values[0]), abs=1e-4)
        _, _, masked = await collect(driver, prompt, first_mask_ids=(first.token_id,))
        assert masked.token_id == int(best.indices[1])
        assert masked.logprob is None


async def test_closing_stops_at_the_next_chunk(llama_dir, monkeypatch):
    seen = []
    compute = prefill._compute
    monkeypatch.setattr(prefill, "_compute", lambda model, feed: (seen.append(feed.start), compute(model, feed))[1])
    async with running(llama_dir, chunk_tokens=16) as driver:
        work = driver.prefill.prefill(PrefillRequest("t", "r", prompt_of(200)))
        assert isinstance(await anext(work), KVChunk)
        await work.aclose()
        _, _, first = await collect(driver, prompt_of(5))
    assert first is not None
    assert len(seen) <= 1 + 2 + 1  # of 13 chunks: the first, at most the two behind it, and the other request's


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompt_token_ids": prompt_of(65)}, "context_length_exceeded"),
        ({"prompt_token_ids": ()}, "invalid_request"),
        ({"prompt_token_ids": (9999,)}, "invalid_request"),
        ({"sampling": Sampling(top_p=7.0)}, "invalid_request"),
        ({"logprobs": 50}, "invalid_request"),
    ],
    ids=["too long", "empty", "foreign id", "top_p", "logprobs"],
)
async def test_bad_requests_are_refused(llama_dir, changes, code):
    request = {"transfer_id": "t", "request_id": "r", "prompt_token_ids": (1, 2), **changes}
    async with running(llama_dir, max_context=64) as driver:
        with pytest.raises(InvalidRequest) as caught:
            await anext(driver.prefill.prefill(PrefillRequest(**request)))
        assert caught.value.code == code


async def test_info_tells_the_generation_config(tmp_path, llama_dir):
    for file in llama_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = '{"eos_token_id": [7, 8], "temperature": 0.6, "top_k": 20, "do_sample": true}'
    (tmp_path / "generation_config.json").write_text(text)
    async with running(tmp_path) as driver:
        info = driver.prefill_info
    assert info.eos_token_ids == (7, 8)
    assert info.sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert info.layout.fingerprint == driver.layout.fingerprint
