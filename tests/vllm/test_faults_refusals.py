"""Decode refuses, and leases end: the client is told, nothing is read that is not there any more, and all is freed."""

from __future__ import annotations

import time

import pytest
from calls import at_once, token_ids
from faults import Watch, new_prompt, refuse, staged
from world import wait_for

pytestmark = [pytest.mark.world("tiny", "mooncake"), pytest.mark.timeout(900)]


@pytest.fixture
def stage(world, pool):
    found = staged(world, pool)
    yield found
    refuse(found.node, 0)


def test_decode_itself_refuses(stage):
    """With what prefill is not asked: the ids whose log probabilities the client wants."""
    watch = Watch(stage)
    began = time.monotonic()
    asked = [stage.ask(stream=stream, logprobs=1, logprob_token_ids=[10**8]) for stream in (False, True)]
    for one in asked:
        watch.saw(f"decode answers 400{', streamed' if one.stream else ''}", one, began)
        assert one.status == 400, one
    watch.settle(began)


def test_something_in_front_of_decode_refuses(stage):
    """vLLM never hears of the request, so that prefill's KV waits for its lease."""
    watch = Watch(stage)
    refuse(stage.node, 503)
    began = time.monotonic()
    asked = [stage.ask(stream=stream) for stream in (False, True)]
    for one in asked:
        watch.saw(f"decode answers 503{', streamed' if one.stream else ''}", one, began)
        assert one.status in (502, 503), one
    refuse(stage.node, 0)
    watch.settle(began)


def test_the_lease_ends_before_decode_loads(stage, full):
    """Decode's engine does nothing for longer than the lease; by then prefill has given the blocks to others."""
    if not full:
        pytest.skip("takes as long as the lease")
    watch = Watch(stage)
    with stage.asked(2) as ((whole, streamed), _):
        began = time.monotonic()
        wait_for(lambda: stage.prefill.gauges()["kv_usage"] == 0, 60, lambda: f"held: {stage.prefill.gauges()}")
        freed = time.monotonic()
        at_once(4, lambda prompt: token_ids(stage.prefill.url, prompt, 1), [new_prompt(1500) for _ in range(30)])
    for one in (streamed, whole):
        watch.saw(f"lease ends{', streamed' if one.stream else ''}", one, began, None)
        assert one.status in (502, 504), f"{one}: may be another's KV"
    print(f"{stage.pool}: freed {freed - began:.0f} s after prefill's answer; not streamed: {whole.seen()}")
    # With push, decode holds on to what it takes for a request whose prefill will never write.
    watch.settle(freed, may_keep=stage.node if stage.pool == "push" else None)
