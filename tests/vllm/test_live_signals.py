"""What real servers tell besides answers: their caches' contents, and their load in headers."""

from __future__ import annotations

import json
import random
import re
import urllib.request

import pytest
from calls import get, post
from world import wait_for

pytestmark = pytest.mark.world("api")


def blocks(world) -> float:
    """That the router knows to be in the cache of the prefill instance."""
    _, text = get(f"{world.router_url}/metrics")
    found = re.search(r'^pdhub_router_cache_blocks\{endpoint="prefill-pull"\} (\S+)$', text, re.MULTILINE)
    assert found, "the router does not listen to the instance"
    return float(found[1])


def test_the_router_knows_what_the_instance_has_cached(world):
    size, before = world.kind.block, blocks(world)
    prompt = [random.randrange(68, 120) for _ in range(5 * size + 3)]
    body = {"model": "m", "prompt": prompt, "max_tokens": 1}
    assert post(f"{world.router_url}/v1/completions", body, world.via("pull"))[0] == 200
    wait_for(lambda: blocks(world) >= before + 5, 30, lambda: f"{blocks(world)} blocks, {before} before")
    # The second time nothing new is stored, and prefill finds all that it may use.
    status, text = post(f"{world.router_url}/v1/completions", body, world.via("pull"))
    assert status == 200
    assert json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"] == 5 * size
    assert blocks(world) == before + 5


def test_text_of_a_prompt_leads_to_its_blocks(world):
    """What the policy is told, as a dry run shows it."""
    words = " ".join(str(random.randrange(10_000)) for _ in range(400))  # two thousand tokens, three text blocks
    body = {"model": "m", "prompt": words, "max_tokens": 1}

    def told(prompt):
        status, text = post(f"{world.router_url}/explain", {**body, "prompt": prompt}, world.via("pull"))
        assert status == 200, text
        return json.loads(text)["request"].get("cached", {}).get("prefill-pull")

    assert told(words) is None, "unknown: nobody has told its tokens"
    assert post(f"{world.router_url}/v1/completions", body, world.via("pull"))[0] == 200
    wait_for(lambda: told(words) == 1.0, 30, lambda: f"told {told(words)}")
    other = told(words[:1100] + " " + words[:700])
    assert other is not None
    assert 0.3 < other < 0.9, "two of its text blocks were seen"


def test_load_in_headers_comes_from_vllm_and_stays_inside(world):
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1}).encode()
    asked = {"content-type": "application/json", "endpoint-load-metrics-format": "TEXT", **world.via("pull")}

    def header(url):
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, asked), timeout=60) as reply:
            return reply.headers.get("endpoint-load-metrics")

    told = header(world.server("prefill-pull").url)
    assert told.startswith("TEXT")
    assert "num_requests_waiting" in told
    from pdhub_vllm.metrics import read_orca

    load = read_orca({"endpoint-load-metrics": told})
    assert load is not None
    assert load.waiting == 0
    assert load.kv_usage is not None
    assert header(world.router_url) is None
