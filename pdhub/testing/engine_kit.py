"""The conformance kit for engines.

Subclass it in ``tests/test_conformance.py`` of a plugin and override one fixture::

    from pdhub.testing import EngineConformance
    from pdhub_myengine.plugin import SPEC

    class TestMyEngine(EngineConformance):
        @pytest.fixture
        def spec(self):
            return SPEC

Each rule is a test whose name starts with a stable id (``E…`` runtime, ``P…`` embedded prefill, ``C…`` client);
its docstring says why the rule exists. What the capabilities declare is proven, what they do not declare must be
refused. Rules of a facet that the engine does not have are skipped, saying so.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from pdhub.api import (
    AdmissionRejected,
    Capabilities,
    EngineSpec,
    Feature,
    Finished,
    FinishReason,
    FirstToken,
    InvalidRequest,
    KVChunk,
    Landing,
    LayoutMismatch,
    PrefillRequest,
    RequestCancelled,
    Sampling,
    TokenChunk,
)
from pdhub.api.engine import ClaimRequest
from pdhub.api.layout import KVLayout
from pdhub.testing.drive import GREEDY, EngineDriver
from pdhub.testing.engine_features import UNDECLARED, FeatureRules, beyond_limits
from pdhub.testing.loop_watch import LoopWatch

PATIENCE_S = 30.0
"""Bound on anything that must end; generous, because it is no measurement."""

STALL_S = 0.15
"""How long an engine may keep the event loop from everything else."""

STALL_TRIES = 5
"""Only an engine that stalls every time is at fault: a loaded machine stalls anybody now and then."""


class EngineConformance(FeatureRules):
    """Override :meth:`spec`; the other fixtures have defaults that suit small engines."""

    @pytest.fixture
    def spec(self) -> EngineSpec:
        raise NotImplementedError("override the `spec` fixture with your EngineSpec")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """Options of the engine, as in YAML's ``config``. Two slots where the engine can, so that sharing shows."""
        return {}

    @pytest.fixture
    def model_path(self) -> str | None:
        """Model that the engine loads."""
        return None

    @pytest.fixture
    def prompt(self) -> tuple[int, ...]:
        """Token ids of a prompt of several blocks."""
        return tuple(97 + (7 * n) % 26 for n in range(21))

    @pytest.fixture
    async def driver(
        self, spec: EngineSpec, options: dict[str, Any], model_path: str | None
    ) -> AsyncIterator[EngineDriver]:
        if spec.runtime is None:
            pytest.skip("no runtime facet")
        driver = EngineDriver(spec, spec.config.model_validate(options), model_path)
        await driver.start()
        yield driver
        await driver.close()

    def reference(self, prompt: Sequence[int], max_tokens: int) -> list[int] | None:
        """The engine's plain greedy tokens without a hand-over, or None if there is no such way."""
        return None

    # ---- start and landings

    async def test_E01_start_tells_what_the_engine_is(self, driver: EngineDriver) -> None:
        """The router plans with these figures; zero slots or no context would never be chosen, silently."""
        caps = driver.info.capabilities
        assert isinstance(caps, Capabilities)
        assert caps.slots >= 1, "an engine has at least one slot"
        assert caps.max_context > 1, "max_context must be known after start"
        assert caps.cancel_within_s > 0
        assert driver.info.accepts, "a hosted engine takes KV in at least one layout"
        assert (Feature.LOGPROBS in caps.features) == (caps.max_logprobs > 0)

    async def test_E02_landings_are_big_enough_and_disjoint(self, driver: EngineDriver) -> None:
        """Two requests in one span is how one client gets another's answer."""
        landings = [driver.claim(tokens) for tokens in (1, 17)]
        spans = sorted((r.address, r.address + r.nbytes) for one in landings for r in one.regions)
        for landing, tokens in zip(landings, (1, 17), strict=True):
            assert landing.tokens >= tokens
            assert len(landing.regions) == landing.layout.shards
            for region in landing.regions:
                assert region.nbytes >= landing.layout.landing_bytes(landing.tokens)
        assert len({landing.id for landing in landings}) == len(landings), "landing ids are unique"
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start, "landings overlap"
        for landing in landings:
            driver.engine.release(landing)

    async def test_E03_claims_are_bounded_and_all_or_nothing(self, driver: EngineDriver) -> None:
        """A full node says so before a prefill is spent; a refused claim must not eat capacity."""
        for _ in range(3):
            held: list[Landing] = []
            refused: AdmissionRejected | None = None
            while refused is None and len(held) < 4096:
                try:
                    held.append(driver.claim(4))
                except AdmissionRejected as error:
                    refused = error
            assert refused is not None, "claims are not bounded"
            assert refused.contended, "taken capacity is contention"
            assert len(held) >= driver.info.capabilities.slots + 1, "fewer landings than slots + 1"
            with pytest.raises(AdmissionRejected):
                driver.claim(4)
            for landing in held:
                driver.engine.release(landing)

    async def test_E04_a_foreign_layout_is_refused(self, driver: EngineDriver) -> None:
        """Bytes of another layout would be read as KV: fluent nonsense with status 200."""
        mine = driver.layout
        other = KVLayout(mine.model + "-other", mine.version, mine.shards, mine.groups, mine.order)
        with pytest.raises(LayoutMismatch):
            driver.engine.claim(ClaimRequest(driver.new_id(), 4, 8, other))

    async def test_E05_what_can_never_fit_is_invalid(self, driver: EngineDriver) -> None:
        """Busy and impossible differ: a client would retry forever."""
        beyond = driver.info.capabilities.max_context + 1
        with pytest.raises(InvalidRequest):
            driver.claim(4, max_total=beyond)

    async def test_E06_release_gives_everything_back(self, driver: EngineDriver, prompt: tuple[int, ...]) -> None:
        """A leak of one landing a day takes a node out in a week."""
        before = set(driver.transport.regions)
        for _ in range(3):
            await driver.answer(prompt, 3)
        driver.engine.release(driver.claim(8))
        assert set(driver.transport.regions) == before, "regions leak"

    async def test_E07_what_is_declared_is_what_starts(
        self, driver: EngineDriver, spec: EngineSpec, options: dict[str, Any]
    ) -> None:
        """`pdhub explain` answers from what the spec declares; where it differs, the answer is wrong."""
        if spec.declares is None:
            pytest.skip("the spec declares nothing")
        declared, real = spec.declares(spec.config.model_validate(options)), driver.info.capabilities
        assert declared.features == real.features
        assert (declared.slots, declared.max_logprobs) == (real.slots, real.max_logprobs)
        assert (declared.max_top_k, declared.logprobs_from) == (real.max_top_k, real.logprobs_from)
        assert declared.max_context >= real.max_context, "a model may shorten what the options allow, not lengthen it"

    # ---- streams

    async def test_E10_the_first_token_is_prefills(self, driver: EngineDriver, prompt: tuple[int, ...]) -> None:
        """Sampling it again would give the client a token that the KV does not continue."""
        received = await driver.receive(prompt)
        answer = await driver.decode(received, driver.request(received, 4))
        assert answer.tokens[0] == received.first.token_id

    async def test_E11_exactly_one_finished_last_with_the_count(
        self, driver: EngineDriver, prompt: tuple[int, ...]
    ) -> None:
        """Usage is billed from the count; a second end, or none, hangs strict clients."""
        answer = await driver.answer(prompt, 6)
        assert len(answer.finished) == 1
        assert answer.after_finish == 0
        assert answer.finished[0].completion_tokens == len(answer.tokens)

    @pytest.mark.parametrize("limit", [1, 2, 5])
    async def test_E12_max_tokens_counts_the_first(
        self, driver: EngineDriver, prompt: tuple[int, ...], limit: int
    ) -> None:
        """``max_tokens: 1`` is the commonest off-by-one of a two-leg system."""
        answer = await driver.answer(prompt, limit)
        assert len(answer.tokens) <= limit
        if len(answer.tokens) < limit:
            assert answer.finished[0].reason is FinishReason.STOP
        elif answer.finished[0].stop_token is None:
            assert answer.finished[0].reason is FinishReason.LENGTH

    async def test_E13_greedy_repeats_itself(self, driver: EngineDriver, prompt: tuple[int, ...]) -> None:
        """State left over from an earlier request shows as a different answer."""
        first = await driver.answer(prompt, 8)
        await driver.answer(prompt[:5], 4)
        assert (await driver.answer(prompt, 8)).tokens == first.tokens

    async def test_E14_the_answer_is_the_plain_one(self, driver: EngineDriver, prompt: tuple[int, ...]) -> None:
        """Handed-over KV must give what the engine alone gives, also one token around a block's border."""
        block = driver.layout.groups[0].block_tokens
        for length in (block - 1, block, block + 1, len(prompt)):
            text = (prompt * 8)[: max(1, length)]
            expected = self.reference(text, 8)
            if expected is None:
                pytest.skip("no reference given")
            assert (await driver.answer(text, 8)).tokens == expected, f"differs at {length} prompt tokens"

    async def test_E15_streams_side_by_side_do_not_mix(self, driver: EngineDriver, prompt: tuple[int, ...]) -> None:
        """A token of one request in another's answer is the worst fault there is."""
        slots = min(driver.info.capabilities.slots, 8)
        prompts = [prompt[n:] + prompt[:n] for n in range(slots)]
        alone = [(await driver.answer(p, 8)).tokens for p in prompts]
        together = await asyncio.gather(*(driver.answer(p, 8) for p in prompts))
        assert [a.tokens for a in together] == alone

    async def test_E16_the_next_landing_fills_while_one_decodes(
        self, driver: EngineDriver, prompt: tuple[int, ...]
    ) -> None:
        """Landing and slot are two counters: a node with one slot receives the next request meanwhile."""
        expected = (await driver.answer(prompt[::-1], 6)).tokens
        first = await driver.receive(prompt)
        await driver.inject(first)
        stream = driver.stream(first, driver.request(first, 6))
        await anext(stream)
        second = await driver.receive(prompt[::-1])
        tokens = [item async for item in stream]
        driver.engine.release(first.landing)
        assert tokens
        assert (await driver.decode(second, driver.request(second, 6))).tokens == expected

    async def test_E17_cancel_ends_the_stream(self, driver: EngineDriver, prompt: tuple[int, ...]) -> None:
        """A cancelled request that keeps its slot is an outage under an abort storm."""
        received = await driver.receive(prompt)
        request = driver.request(received, driver.info.capabilities.max_context - len(prompt), **_endless(driver))
        await driver.inject(received)
        stream = driver.stream(received, request)
        await anext(stream)
        driver.engine.cancel(request.transfer_id)
        driver.engine.cancel(request.transfer_id)
        bound = max(driver.info.capabilities.cancel_within_s * 4, 5.0)
        with pytest.raises(RequestCancelled):
            await asyncio.wait_for(_drain(stream), bound)
        driver.engine.release(received.landing)
        assert (await driver.answer(prompt, 3)).finished

    async def test_E18_cancel_of_the_unknown_is_nothing(self, driver: EngineDriver, prompt: tuple[int, ...]) -> None:
        """An abort may come late, early or twice; one that raises has killed whole engines."""
        driver.engine.cancel("never-seen")
        received = await driver.receive(prompt)
        request = driver.request(received, 2)
        await driver.decode(received, request)
        driver.engine.cancel(request.transfer_id)

    async def test_E19_a_dropped_stream_frees_its_slot(self, driver: EngineDriver, prompt: tuple[int, ...]) -> None:
        """The host closes the iterator when a client leaves; the slot must be usable at once."""
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(driver.info.capabilities.slots + 1):
                received = await driver.receive(prompt)
                await driver.inject(received)
                stream = driver.stream(received, driver.request(received, 64, **_endless(driver)))
                await anext(stream)
                await stream.aclose()  # type: ignore[attr-defined]
                driver.engine.release(received.landing)
            assert (await driver.answer(prompt, 3)).finished

    async def test_E20_load_is_readable_at_any_time(self, driver: EngineDriver, prompt: tuple[int, ...]) -> None:
        """Unknown is None; a wrong number steers traffic."""
        idle = driver.engine.load()
        assert idle.running in (None, 0)
        received = await driver.receive(prompt)
        await driver.inject(received)
        stream = driver.stream(received, driver.request(received, 16, **_endless(driver)))
        await anext(stream)
        assert driver.engine.load().running in (None, 1)
        await stream.aclose()  # type: ignore[attr-defined]
        driver.engine.release(received.landing)

    async def test_E21_close_is_idempotent_and_frees(self, driver: EngineDriver) -> None:
        """Shutdown runs on every path, sometimes twice."""
        driver.claim(4)
        await driver.engine.close()
        await driver.engine.close()
        assert not driver.transport.regions, "close leaves regions behind"

    async def test_E22_the_event_loop_is_never_held(self, driver: EngineDriver, prompt: tuple[int, ...]) -> None:
        """Heartbeats, cancels and every other request share the loop with the engine; one that computes on it makes
        the node look dead. Slow work belongs in a thread, or in a process of its own."""
        stalls: list[float] = []
        while not stalls or (min(stalls) > STALL_S and len(stalls) < STALL_TRIES):
            async with LoopWatch() as claiming:
                driver.engine.release(driver.claim(len(prompt)))
            received = await driver.receive(prompt)  # also the kit's copying, which is no fault of the engine
            async with LoopWatch() as decoding:
                await driver.decode(received, driver.request(received, 4))
            stalls.append(max(claiming.longest_s, decoding.longest_s))
        assert min(stalls) <= STALL_S, f"claim, inject or decode held the event loop for {min(stalls):.2f} s"

    @pytest.mark.parametrize("feature", sorted(UNDECLARED), ids=str)
    async def test_E30_undeclared_is_refused(
        self, driver: EngineDriver, prompt: tuple[int, ...], feature: Feature
    ) -> None:
        """A parameter that is ignored gives a wrong answer with status 200."""
        if feature in driver.info.capabilities.features:
            pytest.skip(f"{feature} is declared (proven by its own rule)")
        received = await driver.receive(prompt)
        try:
            await driver.inject(received)
            with pytest.raises(InvalidRequest):
                await anext(driver.stream(received, driver.request(received, 4, **UNDECLARED[feature])))
        finally:
            driver.engine.release(received.landing)

    async def test_E40_beyond_a_declared_limit_is_refused(self, driver: EngineDriver, prompt: tuple[int, ...]) -> None:
        """The router keeps to the limits, but may have read them from another start of the node."""
        beyond = list(beyond_limits(driver.info.capabilities))
        if not beyond:
            pytest.skip("no limit is declared")
        for members in beyond:
            received = await driver.receive(prompt)
            try:
                await driver.inject(received)
                with pytest.raises(InvalidRequest):
                    await anext(driver.stream(received, driver.request(received, 4, **members)))
            finally:
                driver.engine.release(received.landing)

    # ---- embedded prefill

    async def test_P01_chunks_cover_the_prompt_once(self, driver: EngineDriver, prompt: tuple[int, ...]) -> None:
        """A hole or an overlap is KV of nobody."""
        chunks, last = await _chunks(driver, prompt)
        assert [c.start for c in chunks] == [0, *[c.stop for c in chunks[:-1]]]
        assert chunks[-1].stop == len(prompt)
        assert isinstance(last, FirstToken)
        layout = driver.prefill_info.layout if driver.prefill_info else driver.layout
        for chunk in chunks:
            assert all(chunk.start % g.block_tokens == 0 for g in layout.groups), "chunks start on a block's border"
            size = sum(
                (g.blocks(chunk.stop) - chunk.start // g.block_tokens) * len(g.layers) * g.block_bytes
                for g in layout.groups
            )
            assert chunk.nbytes == size, "nbytes differs from the layout's arithmetic"

    async def test_P02_prefill_and_decode_agree_on_the_layout(self, driver: EngineDriver) -> None:
        """One plugin whose own halves do not fit could never serve."""
        if driver.prefill_info is None:
            pytest.skip("no prefill facet")
        accepted = {layout.fingerprint for layout in driver.info.accepts}
        assert driver.prefill_info.layout.fingerprint in accepted

    async def test_P03_an_abandoned_prefill_stops(self, driver: EngineDriver, prompt: tuple[int, ...]) -> None:
        """Ten cancelled long prefills must not delay the eleventh."""
        if driver.prefill is None:
            pytest.skip("no prefill facet")
        expected = await _chunks(driver, prompt)
        stream = driver.prefill.prefill(PrefillRequest(driver.new_id(), "kit", prompt, GREEDY))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert (await _chunks(driver, prompt))[1] == expected[1]

    async def test_P04_a_prompt_beyond_the_context_is_invalid(self, driver: EngineDriver) -> None:
        """It must be a client's error, not a crash in a kernel."""
        if driver.prefill is None or driver.prefill_info is None:
            pytest.skip("no prefill facet")
        long = (97,) * (driver.prefill_info.capabilities.max_context + 1)
        with pytest.raises(InvalidRequest):
            await anext(driver.prefill.prefill(PrefillRequest(driver.new_id(), "kit", long, GREEDY)))

    async def test_P05_ids_pass_through_and_junk_is_invalid(self, driver: EngineDriver) -> None:
        """Token prompts are never re-tokenised; what cannot be rendered is a 400."""
        if driver.prefill is None:
            pytest.skip("no prefill facet")
        assert driver.prefill.tokenize({"prompt": [97, 98]}) == (97, 98)
        assert driver.prefill.tokenize({"prompt": "ab"})
        for junk in ({"prompt": {"a": 1}}, {"prompt": [97, "x"]}, {"messages": [{"role": 3}]}, {"prompt": [-1]}):
            with pytest.raises(InvalidRequest):
                driver.prefill.tokenize(junk)


def _endless(driver: EngineDriver) -> dict[str, Any]:
    """Arguments that keep a stream from ending by itself, where the engine can."""
    return {"ignore_eos": True} if Feature.IGNORE_EOS in driver.info.capabilities.features else {}


async def _drain(stream: AsyncIterator[TokenChunk | Finished]) -> None:
    async for _ in stream:
        pass


async def _chunks(driver: EngineDriver, prompt: Sequence[int]) -> tuple[list[KVChunk], FirstToken]:
    if driver.prefill is None:
        pytest.skip("no prefill facet")
    chunks: list[KVChunk] = []
    first: FirstToken | None = None
    async for item in driver.prefill.prefill(PrefillRequest(driver.new_id(), "kit", tuple(prompt), Sampling(0.0))):
        assert first is None, "something follows the first token"
        if isinstance(item, FirstToken):
            first = item
            continue
        region = driver.transport.allocate(item.nbytes)
        item.write_into(region)
        driver.transport.unregister(region.id)
        chunks.append(item)
    assert first is not None
    return chunks, first
