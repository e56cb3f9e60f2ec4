"""Servers are killed in every phase of a request: the client is told at once, and nothing else suffers.

CI kills one server a flow; `make test-vllm-full` all.
"""

from __future__ import annotations

import time

import pytest
from calls import token_ids
from faults import Watch, staged

pytestmark = [pytest.mark.world("tiny", "mooncake"), pytest.mark.timeout(900)]

IN_CI = {"pull": "after", "push": "loading", "mooncake": "streaming"}
"""The kill of each flow that runs in CI."""


@pytest.fixture
def stage(world, pool, full, request):
    """With both servers warm. A test of another kill than CI's is for full runs."""
    kill = request.node.get_closest_marker("kill").args[0]
    if not full and IN_CI.get(pool, kill) != kill:
        pytest.skip("runs in make test-vllm-full")
    found = staged(world, pool)
    yield found
    world.wait_ready()


@pytest.mark.kill("in")
def test_prefill_is_killed_in_its_leg(stage):
    watch = Watch(stage)
    with stage.in_prefill(2) as (asked, _):
        killed = stage.kill(stage.prefill)
        for one in asked:
            watch.saw(f"prefill killed in its leg{_way(one)}", one, killed)
            assert one.status in (502, 503), one
    began = time.monotonic()
    before = stage.ask()
    watch.saw("prefill killed before", before, began)
    assert before.status in (502, 503), before
    _settle_without_prefill(stage, watch, killed)


@pytest.mark.kill("after")
def test_prefill_is_killed_after_its_leg(stage):
    """What decode loads just then fails; what it already answers is not disturbed."""
    watch = Watch(stage)
    answered = stage.streaming()
    with stage.loading(2) as (asked, _):
        assert not answered.ended, "the stream is longer than the preparations"
        killed = stage.kill(stage.prefill)
        for one in asked:
            watch.saw(f"prefill killed while decode loads{_way(one)}", one, killed)
            assert one.status == 502, one
    watch.saw("prefill killed while decode streams", answered, killed, None)
    assert answered.seen() == "200"
    assert answered.ids() == token_ids(stage.world.single.url, answered.prompt, len(answered.ids()))
    _settle_without_prefill(stage, watch, killed)


@pytest.mark.kill("streaming")
def test_decode_is_killed_while_it_streams(stage):
    watch = Watch(stage)
    whole = stage.ask(tokens=1500)
    streamed = stage.streaming()
    stage.until_with_decode(2)
    with stage.in_prefill(1) as (computed, prefill):
        killed = stage.kill(stage.node)
        watch.saw("decode killed while streaming", streamed, killed)
        assert streamed.seen().startswith("200, then event"), streamed
        assert b"[DONE]" not in streamed.data
        got = streamed.ids()
        watch.saw("decode killed while answering", whole, killed)
        assert whole.status == 502, whole
        prefill.thaw()
        thawed = time.monotonic()
        watch.saw("decode killed while prefill computes", computed[0], thawed)
        assert computed[0].status in (502, 503), computed[0]
    began = time.monotonic()
    before = stage.ask()
    watch.saw("decode killed before", before, began)
    assert before.status in (502, 503), before
    watch.settle(killed, stage.node)
    assert got == token_ids(stage.world.single.url, streamed.prompt, len(got)), "what came was right"


@pytest.mark.kill("loading")
def test_decode_is_killed_while_it_loads(stage):
    watch = Watch(stage)
    with stage.loading(2) as (asked, _):
        killed = stage.kill(stage.node)
        for one in asked:
            watch.saw(f"decode killed while loading{_way(one)}", one, killed)
            assert one.status == 502, one
    watch.settle(killed, stage.node)


def _settle_without_prefill(stage, watch, killed):
    """A decode node that waited for a write waits on in vLLM, though its clients are gone: with Mooncake for 105 s,
    with push for ever. The tree starts it again."""
    watch.settle(killed, stage.prefill, keeps=None if stage.pool == "pull" else stage.node)


def _way(asked):
    return ", streamed" if asked.stream else ""
