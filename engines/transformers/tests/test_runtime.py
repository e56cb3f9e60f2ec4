"""The decode engine: ends, refusals, cancellation and sharing."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from pdhub_transformers import worker
from support import Plain, prompt_of, running

from pdhub.api import EngineFailed, Finished, FinishReason, Handoff, InvalidRequest, RequestCancelled, Sampling
from pdhub.api import TransferFailed as Failed


async def test_the_context_ends_a_request(llama_dir):
    async with running(llama_dir, max_context=32) as driver:
        answer = await driver.answer(prompt_of(28), 100, ignore_eos=True)
        assert len(answer.tokens) == 4
        assert answer.finished == [Finished(FinishReason.LENGTH, 4)]
        full = await driver.answer(prompt_of(32), 100, ignore_eos=True)
        assert full.finished == [Finished(FinishReason.LENGTH, 1)]


async def test_end_of_sequence_ends_it_unless_ignored(llama_dir):
    force = Sampling(0.0, logit_bias={300: 1000.0})
    async with running(llama_dir) as driver:
        plain = await driver.answer(prompt_of(9), 6, sampling=force)
        assert plain.finished == [Finished(FinishReason.STOP, 1, 300)]
        ignored = await driver.answer(prompt_of(9), 6, sampling=force, ignore_eos=True)
        assert ignored.tokens == [300] * 6
        later = await driver.answer(prompt_of(9), 6, sampling=force, min_tokens=3)
        assert later.tokens[-1] == 300
        assert 300 not in later.tokens[:3]
        assert later.finished[0].reason is FinishReason.STOP


async def test_logprobs_are_those_of_the_model(llama_dir):
    plain, prompt = Plain(llama_dir), prompt_of(20)
    async with running(llama_dir) as driver:
        answer = await driver.answer(prompt, 6, logprobs=3, ignore_eos=True)
    values = plain.logits((*prompt, *answer.tokens)).log_softmax(-1)
    for index, entry in enumerate(answer.logprobs):
        row = values[len(prompt) - 1 + index]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": Sampling(temperature=-1.0)}, {"sampling": Sampling(top_p=0.0)}, {"logprobs": 99},
        {"sampling": Sampling(logit_bias={9999: 1.0})}, {"max_tokens": 0},
        {"sampling": Sampling(temperature=math.nan)},
    ],
    ids=str,
)  # fmt: skip
async def test_bad_requests_are_refused_before_the_first_item(llama_dir, changes):
    async with running(llama_dir) as driver:
        received = await driver.receive(prompt_of(5))
        await driver.inject(received)
        with pytest.raises(InvalidRequest):
            await anext(driver.stream(received, driver.request(received, **changes)))
        driver.engine.release(received.landing)


async def test_a_stop_id_that_the_model_does_not_have_ends_nothing(llama_dir):
    """Nor is it worth a refusal after prefill: the router does not know the vocabulary."""
    async with running(llama_dir) as driver:
        plain = await driver.answer(prompt_of(9), 6, ignore_eos=True)
        same = await driver.answer(prompt_of(9), 6, ignore_eos=True, stop_token_ids=(9999,), min_tokens=3)
        assert same.tokens == plain.tokens


async def test_kv_and_prompt_must_belong_together(llama_dir):
    async with running(llama_dir) as driver:
        received = await driver.receive(prompt_of(5))
        with pytest.raises(Failed):
            await driver.engine.inject(received.landing, Handoff(received.landing.tokens + 1, 0))
        with pytest.raises(Failed):  # nothing was injected
            await anext(driver.stream(received, driver.request(received)))
        await driver.inject(received)
        with pytest.raises(Failed):
            await anext(driver.stream(received, driver.request(received, prompt_token_ids=prompt_of(6))))
        driver.engine.release(received.landing)
        with pytest.raises(EngineFailed):
            await driver.inject(received)


async def test_cancel_ends_one_stream_and_no_other(llama_dir):
    plain = Plain(llama_dir)
    async with running(llama_dir, slots=2) as driver:
        victim, other = (
            await driver.receive(prompt_of(9)),
            asyncio.create_task(driver.answer(prompt_of(30, 2), 60, min_tokens=60)),
        )
        await driver.inject(victim)
        request = driver.request(victim, 200, ignore_eos=True)
        stream = driver.stream(victim, request)
        for _ in range(3):
            await anext(stream)
        driver.engine.cancel(request.transfer_id)
        driver.engine.cancel(request.transfer_id)
        driver.engine.cancel("unknown")
        with pytest.raises(RequestCancelled):
            async for _ in stream:
                pass
        driver.engine.release(victim.landing)
        assert (await other).tokens == plain.greedy(prompt_of(30, 2), 60)


async def test_closing_a_stream_frees_its_slot(llama_dir):
    async with running(llama_dir) as driver:
        for _ in range(4):
            received = await driver.receive(prompt_of(9))
            await driver.inject(received)
            stream = driver.stream(received, driver.request(received, 200, ignore_eos=True))
            await anext(stream)
            await anext(stream)
            await stream.aclose()
            driver.engine.release(received.landing)
        load = driver.engine.load()
        assert (load.running, load.waiting, load.remaining_tokens, load.kv_usage) == (0, 0, 0, 0.0)


async def test_more_streams_than_slots_wait_in_order(llama_dir):
    plain = Plain(llama_dir)
    async with running(llama_dir, slots=1) as driver:
        prompts = [prompt_of(6), prompt_of(7)]
        answers = await asyncio.gather(*(driver.answer(prompt, 10, min_tokens=10) for prompt in prompts))
        assert [answer.tokens for answer in answers] == [plain.greedy(prompt, 10) for prompt in prompts]


async def test_nothing_of_an_earlier_request_is_seen(llama_dir):
    """Rows are not cleared: poison them and the answer must not change."""
    plain = Plain(llama_dir)
    async with running(llama_dir) as driver:
        for row in driver.engine._rows:
            row.kv.fill_(math.nan)
        assert (await driver.answer(prompt_of(17), 12, min_tokens=12)).tokens == plain.greedy(prompt_of(17), 12)


async def test_a_failing_step_ends_its_requests_and_not_the_engine(llama_dir, monkeypatch, caplog):
    async with running(llama_dir, slots=2) as driver:
        with monkeypatch.context() as patch:
            patch.setattr(worker, "_sample", lambda *args: 1 / 0)
            results = await asyncio.gather(
                *(driver.answer(prompt_of(5), 8, ignore_eos=True) for _ in range(2)), return_exceptions=True
            )
        assert [type(result) for result in results] == [EngineFailed, EngineFailed]
        assert "a decode step failed" in caplog.text
        assert len((await driver.answer(prompt_of(5), 8, ignore_eos=True)).tokens) == 8


async def test_close_ends_running_streams(llama_dir):
    async with running(llama_dir) as driver:
        received = await driver.receive(prompt_of(5))
        await driver.inject(received)
        stream = driver.stream(received, driver.request(received, 250, ignore_eos=True))
        await anext(stream)
        await driver.engine.close()
        with pytest.raises(RequestCancelled):
            async for _ in stream:
                pass


async def test_sampled_answers_do_not_depend_on_neighbours(llama_dir):
    sampling = Sampling(0.9, top_p=0.95, seed=42)
    async with running(llama_dir, slots=4) as driver:
        alone = await driver.answer(prompt_of(11), 20, sampling=sampling, ignore_eos=True)
        together = await asyncio.gather(
            *(driver.answer(prompt_of(11 + n, n), 20, sampling=sampling, ignore_eos=True) for n in range(4))
        )
    assert together[0].tokens == alone.tokens
    assert torch.tensor(alone.tokens).max() < 320
