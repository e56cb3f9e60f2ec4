"""Each rule of the engine kit catches at least one broken engine: a rule that nothing can fail proves nothing."""

import asyncio
import dataclasses
import inspect
import time

import pytest

from pdhub.api import (
    Capabilities,
    EngineInfo,
    EngineLoad,
    EngineSpec,
    Feature,
    Finished,
    FirstToken,
    PrefillInfo,
    RequestCancelled,
    Sampling,
    TokenChunk,
)
from pdhub.testing import EngineConformance, toy
from pdhub.testing.drive import EngineDriver

PROMPT = tuple(97 + (7 * n) % 26 for n in range(21))


class Mutant(toy.ToyEngine):
    """Base: a toy whose stream can be rewritten."""

    extra = frozenset()

    async def start(self):
        info = await super().start()
        caps = info.capabilities
        return dataclasses.replace(info, capabilities=dataclasses.replace(caps, features=caps.features | self.extra))

    async def items(self, landing, request):
        async for item in super().decode(landing, request):
            yield item

    async def decode(self, landing, request):
        async for item in self.items(landing, request):
            yield item


class NoSlots(Mutant):
    async def start(self):
        info = await super().start()
        return EngineInfo(dataclasses.replace(info.capabilities, slots=0), info.accepts)


class SharedLanding(Mutant):
    def claim(self, request):
        landing = super().claim(request)
        self.shared = getattr(self, "shared", landing.regions)
        return dataclasses.replace(landing, regions=self.shared)


class Unbounded(Mutant):
    def __init__(self, config, context):
        super().__init__(config, context)
        self._limit = 10**9


class AnyLayout(Mutant):
    def claim(self, request):
        return super().claim(dataclasses.replace(request, layout=self._layout))


class NoContextCheck(Mutant):
    def claim(self, request):
        return super().claim(dataclasses.replace(request, max_total_tokens=1))


class LeaksRegions(Mutant):
    def release(self, landing):
        self._landings.pop(landing.id)


class SamplesFirstAgain(Mutant):
    async def items(self, landing, request):
        other = 97 + (request.first_token - 96) % 26
        async for item in super().items(landing, dataclasses.replace(request, first_token=other)):
            yield item


class FinishesTwice(Mutant):
    async def items(self, landing, request):
        async for item in super().items(landing, request):
            yield item
            if isinstance(item, Finished):
                yield item


class Miscounts(Mutant):
    async def items(self, landing, request):
        async for item in super().items(landing, request):
            yield dataclasses.replace(item, completion_tokens=1) if isinstance(item, Finished) else item


class OneTooMany(Mutant):
    async def items(self, landing, request):
        request = dataclasses.replace(request, max_tokens=request.max_tokens + 1)
        async for item in super().items(landing, request):
            yield item


class Remembers(Mutant):
    served = 0

    async def items(self, landing, request):
        self.served += 1
        async for item in super().items(landing, request):
            if isinstance(item, TokenChunk) and item.token_ids != (request.first_token,):
                item = TokenChunk((97 + self.served,))
            yield item


class LosesAFullBlock(Mutant):
    async def inject(self, landing, handoff):
        await super().inject(landing, handoff)
        if handoff.prompt_tokens % 4 == 0:
            for row in self._entries[landing.id]:
                row.pop()


class MixesStreams(Mutant):
    last = 0

    async def items(self, landing, request):
        async for item in super().items(landing, request):
            if isinstance(item, TokenChunk) and len(self._remaining) > 1:
                self.last, token = item.token_ids[0], self.last
                item = TokenChunk((token or item.token_ids[0],))
            yield item


class RefusesWhileDecoding(Mutant):
    def claim(self, request):
        if self._remaining:
            raise RuntimeError("busy")
        return super().claim(request)


class IgnoresCancel(Mutant):
    def cancel(self, transfer_id):
        return None


class CancelRaises(Mutant):
    def cancel(self, transfer_id):
        self._cancelled[transfer_id].set()


class KeepsSlotOnDrop(Mutant):
    def __init__(self, config, context):
        super().__init__(config, context)
        self.slots = asyncio.Semaphore(config.slots)

    async def items(self, landing, request):
        await self.slots.acquire()
        async for item in super().items(landing, request):
            yield item
        self.slots.release()


class LiesAboutLoad(Mutant):
    def load(self):
        return EngineLoad(running=7)


class CloseLeaks(Mutant):
    async def close(self):
        return None


HELD_S = 0.2
"""What a mutant holds the loop for; the kit's bound is less."""


class ComputesOnTheLoop(Mutant):
    async def items(self, landing, request):
        async for item in super().items(landing, request):
            if isinstance(item, Finished):
                time.sleep(HELD_S)
            yield item


class ClaimsOnTheLoop(Mutant):
    def claim(self, request):
        time.sleep(HELD_S)
        return super().claim(request)


class InjectsOnTheLoop(Mutant):
    async def inject(self, landing, handoff):
        time.sleep(HELD_S)
        await super().inject(landing, handoff)


class IgnoresTheUndeclared(Mutant):
    async def items(self, landing, request):
        sampling = dataclasses.replace(request.sampling, logit_bias={}, top_k=0)
        async for item in super().items(landing, dataclasses.replace(request, sampling=sampling)):
            yield item


class DeclaresMore(IgnoresTheUndeclared):
    extra = frozenset({Feature.LOGIT_BIAS, Feature.TOP_K, Feature.MIN_P})

    async def items(self, landing, request):
        sampling = dataclasses.replace(request.sampling, min_p=0.0)
        async for item in super().items(landing, dataclasses.replace(request, sampling=sampling)):
            yield item


class IgnoresItsLimit(Mutant):
    async def items(self, landing, request):
        at_most = None if request.logprobs is None else min(2, request.logprobs)
        async for item in super().items(landing, dataclasses.replace(request, logprobs=at_most)):
            yield item


class PenaltyBackwards(Mutant):
    extra = frozenset({Feature.PRESENCE_PENALTY, Feature.FREQUENCY_PENALTY, Feature.REPETITION_PENALTY})

    async def items(self, landing, request):
        plain = request.sampling == Sampling(temperature=0.0)
        async for item in super().items(landing, request):
            yield TokenChunk((97,)) if isinstance(item, TokenChunk) and not plain else item


class IgnoresSeed(Mutant):
    async def items(self, landing, request):
        sampling = Sampling(temperature=0.0)
        async for item in super().items(landing, dataclasses.replace(request, sampling=sampling)):
            yield item


class SamePrefillForAll(toy.ToyPrefill):
    async def prefill(self, request):
        async for item in super().prefill(dataclasses.replace(request, sampling=Sampling(temperature=0.0))):
            yield item


class LosesFirstLogprob(Mutant):
    async def items(self, landing, request):
        async for item in super().items(landing, dataclasses.replace(request, first_logprob=None)):
            yield item


class IgnoresStops(Mutant):
    async def items(self, landing, request):
        async for item in super().items(landing, dataclasses.replace(request, stop_token_ids=())):
            yield item


class IgnoresMinTokens(Mutant):
    async def items(self, landing, request):
        async for item in super().items(landing, dataclasses.replace(request, min_tokens=0)):
            yield item


class HonoursEos(Mutant):
    async def items(self, landing, request):
        async for item in super().items(landing, dataclasses.replace(request, ignore_eos=False)):
            yield item


class SkipsAChunk(toy.ToyPrefill):
    async def prefill(self, request):
        async for item in super().prefill(request):
            if isinstance(item, FirstToken) or item.start != 8:
                yield item


class WrongSize(toy.ToyPrefill):
    async def prefill(self, request):
        async for item in super().prefill(request):
            yield item if isinstance(item, FirstToken) else dataclasses.replace(item, nbytes=item.nbytes + 1)


class OtherLayout(toy.ToyPrefill):
    async def start(self):
        info = await super().start()
        return PrefillInfo(dataclasses.replace(info.layout, version=2), info.capabilities, info.chunk_tokens)


class BrokenByAbandon(toy.ToyPrefill):
    broken = False

    async def prefill(self, request):
        try:
            async for item in super().prefill(request):
                yield FirstToken(98) if self.broken and isinstance(item, FirstToken) else item
        except GeneratorExit:
            self.broken = True
            raise


class NoPromptCheck(toy.ToyPrefill):
    async def prefill(self, request):
        yield FirstToken(97)


class TokenizesJunk(toy.ToyPrefill):
    def tokenize(self, body):
        return (97, 98)


RULES = {
    "E01": [NoSlots],
    "E02": [SharedLanding],
    "E03": [Unbounded],
    "E04": [AnyLayout],
    "E05": [NoContextCheck],
    "E06": [LeaksRegions],
    "E07": [NoSlots, DeclaresMore],
    "E10": [SamplesFirstAgain],
    "E11": [FinishesTwice, Miscounts],
    "E12": [OneTooMany],
    "E13": [Remembers],
    "E14": [LosesAFullBlock],
    "E15": [MixesStreams],
    "E16": [RefusesWhileDecoding],
    "E17": [IgnoresCancel],
    "E18": [CancelRaises],
    "E19": [KeepsSlotOnDrop],
    "E20": [LiesAboutLoad],
    "E21": [CloseLeaks],
    "E22": [ComputesOnTheLoop, ClaimsOnTheLoop, InjectsOnTheLoop],
    "E30": [IgnoresTheUndeclared],
    "E31": [(IgnoresSeed, SamePrefillForAll)],
    "E32": [LosesFirstLogprob],
    "E33": [IgnoresStops],
    "E34": [IgnoresMinTokens],
    "E35": [HonoursEos],
    "E36": [DeclaresMore],
    "E37": [PenaltyBackwards],
    "E38": [DeclaresMore],
    "E39": [DeclaresMore],
    "E40": [IgnoresItsLimit],
    "P01": [SkipsAChunk, WrongSize],
    "P02": [OtherLayout],
    "P03": [BrokenByAbandon],
    "P04": [NoPromptCheck],
    "P05": [TokenizesJunk],
}

CASES = [(rule, mutant) for rule, mutants in RULES.items() for mutant in mutants]


class Kit(EngineConformance):
    """The kit with the toy's reference; called rule by rule, never collected."""

    __test__ = False

    def reference(self, prompt, max_tokens):
        return toy.generate(prompt, max_tokens)


def rules() -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for name in dir(EngineConformance):
        if name.startswith("test_"):
            out.setdefault(name.split("_")[1], []).append(name)
    return out


def test_every_rule_has_one_name_and_a_reason_and_a_mutant():
    found = rules()
    assert all(len(names) == 1 for names in found.values()), "a rule id is used twice"
    assert set(found) == set(RULES)
    for (name,) in found.values():
        assert getattr(EngineConformance, name).__doc__


async def run(rule: str, mutant: object) -> None:
    engine, prefill = mutant if isinstance(mutant, tuple) else (mutant, toy.ToyPrefill)
    if issubclass(engine, toy.ToyPrefill):
        engine, prefill = toy.ToyEngine, engine
    spec = EngineSpec(name="mutant", summary="broken", config=toy.ToyConfig, runtime=engine, prefill=prefill)
    spec = dataclasses.replace(spec, declares=toy.ToyConfig.capabilities)
    options = {"slots": 2, "chunk_tokens": 8, "eos_every": 3 if rule == "E35" else 0}
    driver = EngineDriver(spec, toy.ToyConfig(**options))
    await driver.start()

    def need(feature: Feature) -> None:
        assert feature in driver.info.capabilities.features, "the mutant must declare it"

    values = {
        "driver": driver,
        "prompt": PROMPT,
        "need": need,
        "spec": spec,
        "options": options,
        "limit": 2,
        "feature": Feature.FREQUENCY_PENALTY if rule == "E37" else Feature.LOGIT_BIAS,
    }
    method = getattr(Kit(), rules()[rule][0])
    try:
        await method(**{name: values[name] for name in inspect.signature(method).parameters})
    finally:
        await driver.close()


@pytest.mark.parametrize(("rule", "mutant"), CASES, ids=lambda v: v if isinstance(v, str) else None)
async def test_mutant_is_caught(rule, mutant, monkeypatch):
    monkeypatch.setattr("pdhub.testing.engine_kit.PATIENCE_S", 0.5)
    monkeypatch.setattr("pdhub.testing.engine_kit.STALL_TRIES", 2)
    caught = (
        AssertionError,
        pytest.fail.Exception,
        RequestCancelled,
        TimeoutError,
        RuntimeError,
        KeyError,
    )
    with pytest.raises(caught):
        await run(rule, mutant)


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"E36", "E37", "E38", "E39"}))
async def test_the_sound_engine_passes(rule):
    await run(rule, toy.ToyEngine)


def test_capabilities_default_to_nothing():
    assert Capabilities().features == frozenset()
