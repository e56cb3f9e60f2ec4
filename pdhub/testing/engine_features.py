"""Rules about single features of an engine: declared means proven."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pdhub.api import Capabilities, EngineSpec, Feature, FinishReason, Sampling
from pdhub.testing.drive import EngineDriver

UNDECLARED: dict[Feature, dict[str, Any]] = {
    Feature.SAMPLING: {"sampling": Sampling(temperature=0.9, seed=1)},
    Feature.TOP_K: {"sampling": Sampling(temperature=0.9, seed=1, top_k=3)},
    Feature.MIN_P: {"sampling": Sampling(temperature=0.9, seed=1, min_p=0.5)},
    Feature.PRESENCE_PENALTY: {"sampling": Sampling(temperature=0.9, seed=1, presence_penalty=1.0)},
    Feature.FREQUENCY_PENALTY: {"sampling": Sampling(temperature=0.9, seed=1, frequency_penalty=1.0)},
    Feature.REPETITION_PENALTY: {"sampling": Sampling(temperature=0.9, seed=1, repetition_penalty=1.5)},
    Feature.LOGIT_BIAS: {"sampling": Sampling(temperature=0.0, logit_bias={98: 100.0})},
    Feature.LOGPROBS: {"logprobs": 1},
    Feature.IGNORE_EOS: {"ignore_eos": True},
    Feature.MIN_TOKENS: {"min_tokens": 2},
    Feature.STOP_TOKEN_IDS: {"stop_token_ids": (98,)},
}
"""For each feature that a decode request can carry: the smallest request that needs it."""


def beyond_limits(capabilities: Capabilities) -> Iterator[dict[str, Any]]:
    """For each limit that an engine declares of a feature that it has: a request just beyond it."""
    if Feature.LOGPROBS in capabilities.features:
        yield {"logprobs": capabilities.max_logprobs + 1}
        if capabilities.logprobs_from > 0:
            yield {"logprobs": 1, "sampling": Sampling(temperature=capabilities.logprobs_from / 2)}
    if Feature.TOP_K in capabilities.features and capabilities.max_top_k is not None:
        yield {"sampling": Sampling(temperature=1.0, top_k=capabilities.max_top_k + 1)}


class FeatureRules:
    """Part of :class:`pdhub.testing.EngineConformance`."""

    @pytest.fixture
    def need(self, driver: EngineDriver, spec: EngineSpec) -> Any:
        def need(feature: Feature) -> None:
            if feature not in driver.info.capabilities.features:
                pytest.skip(f"{feature} is not declared")

        return need

    async def test_E31_seed_makes_sampling_repeatable(
        self, driver: EngineDriver, prompt: tuple[int, ...], need: Any
    ) -> None:
        """Clients use seeds to debug; and a retry on another node must give the same answer."""
        need(Feature.SEED)
        same = [
            (await driver.answer(prompt, 12, sampling=Sampling(temperature=1.0, seed=7), **_on(driver))).tokens
            for _ in range(2)
        ]
        others = [
            (await driver.answer(prompt, 12, sampling=Sampling(temperature=1.0, seed=s), **_on(driver))).tokens
            for s in range(8, 14)
        ]
        assert same[0] == same[1]
        assert any(other != same[0] for other in others), "the seed changes nothing"

    async def test_E32_logprobs_are_one_a_token(self, driver: EngineDriver, prompt: tuple[int, ...], need: Any) -> None:
        """Lost or doubled entries between the two legs are a known fault."""
        need(Feature.LOGPROBS)
        wanted = min(2, driver.info.capabilities.max_logprobs)
        answer = await driver.answer(prompt, 6, logprobs=wanted)
        assert [entry.token_id for entry in answer.logprobs] == answer.tokens
        for entry in answer.logprobs:
            assert entry.logprob <= 1e-4
            assert len(entry.top) == wanted
            assert list(entry.top) == sorted(entry.top, key=lambda pair: -pair[1])
        assert not (await driver.answer(prompt, 3)).logprobs, "logprobs that nobody asked for"

    async def test_E33_stop_ids_end_the_stream(self, driver: EngineDriver, prompt: tuple[int, ...], need: Any) -> None:
        """The id itself is part of the stream and of the count; the router hides its text."""
        need(Feature.STOP_TOKEN_IDS)
        plain = (await driver.answer(prompt, 8, **_on(driver))).tokens
        stop = plain[-1]
        answer = await driver.answer(prompt, 8, stop_token_ids=(stop,), **_on(driver))
        cut = plain.index(stop) + 1
        assert answer.tokens == plain[:cut]
        assert answer.finished[0].reason is FinishReason.STOP
        assert answer.finished[0].stop_token == stop

    async def test_E34_min_tokens_holds_the_end_back(
        self, driver: EngineDriver, prompt: tuple[int, ...], need: Any
    ) -> None:
        """Neither EOS nor a stop id may come earlier."""
        need(Feature.MIN_TOKENS)
        need(Feature.STOP_TOKEN_IDS)
        plain = (await driver.answer(prompt, 8, **_on(driver))).tokens
        stops = tuple({*plain, *range(97, 115)})
        answer = await driver.answer(prompt, 8, min_tokens=5, stop_token_ids=stops)
        assert len(answer.tokens) >= 5
        assert not set(answer.tokens[:5]) & set(stops)

    async def test_E35_ignore_eos_runs_to_the_limit(
        self, driver: EngineDriver, prompt: tuple[int, ...], need: Any
    ) -> None:
        """Benchmarks rely on it."""
        need(Feature.IGNORE_EOS)
        answer = await driver.answer(prompt, 24, ignore_eos=True)
        assert len(answer.tokens) == 24
        assert answer.finished[0].reason is FinishReason.LENGTH

    async def test_E36_logit_bias_biases(self, driver: EngineDriver, prompt: tuple[int, ...], need: Any) -> None:
        """+100 forces a token, -100 forbids it, on both legs."""
        need(Feature.LOGIT_BIAS)
        plain = (await driver.answer(prompt, 4, **_on(driver))).tokens
        forced = next(token for token in range(97, 123) if token not in plain)
        pushed = await driver.answer(prompt, 4, sampling=Sampling(0.0, logit_bias={forced: 100.0}), **_on(driver))
        assert pushed.tokens == [forced] * len(pushed.tokens)
        barred = await driver.answer(
            prompt, 4, sampling=Sampling(0.0, logit_bias=dict.fromkeys(plain, -100.0)), **_on(driver)
        )
        assert not set(barred.tokens) & set(plain)

    @pytest.mark.parametrize(
        "feature", [Feature.PRESENCE_PENALTY, Feature.FREQUENCY_PENALTY, Feature.REPETITION_PENALTY], ids=str
    )
    async def test_E37_penalties_reduce_repetition(
        self, driver: EngineDriver, prompt: tuple[int, ...], need: Any, feature: Feature
    ) -> None:
        """At its strongest a penalty may not give more repeats than none."""
        need(feature)
        strongest = {"repetition_penalty": 50.0}.get(str(feature), 2.0)
        penalty: dict[str, Any] = {str(feature): strongest}
        plain = (await driver.answer(prompt, 24, **_on(driver))).tokens
        changed = (await driver.answer(prompt, 24, sampling=Sampling(0.0, **penalty), **_on(driver))).tokens
        assert len(set(changed)) >= len(set(plain))

    async def test_E38_top_k_one_is_greedy(self, driver: EngineDriver, prompt: tuple[int, ...], need: Any) -> None:
        """The simplest proof that the cut happens before sampling."""
        need(Feature.TOP_K)
        greedy = (await driver.answer(prompt, 8, **_on(driver))).tokens
        cut = await driver.answer(prompt, 8, sampling=Sampling(1.0, top_k=1, seed=3), **_on(driver))
        assert cut.tokens == greedy

    async def test_E39_min_p_one_is_greedy(self, driver: EngineDriver, prompt: tuple[int, ...], need: Any) -> None:
        """As E38, for min_p."""
        need(Feature.MIN_P)
        greedy = (await driver.answer(prompt, 8, **_on(driver))).tokens
        cut = await driver.answer(prompt, 8, sampling=Sampling(1.0, min_p=1.0, seed=3), **_on(driver))
        assert cut.tokens == greedy


def _on(driver: EngineDriver) -> dict[str, Any]:
    return {"ignore_eos": True} if Feature.IGNORE_EOS in driver.info.capabilities.features else {}
