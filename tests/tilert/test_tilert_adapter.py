"""What TileRT's kernels would be asked for by its own adapter in a hosted node. See tilert_adapter.py."""

import json
import os
import subprocess
import sys

import pytest
from tilert_planes import first_of
from tilert_world import HERE, site

PROMPT = b"a prompt of more than one page " * 3
FIRST = first_of(list(PROMPT))


@pytest.fixture(scope="module")
def told():
    env = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{site()}", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(HERE / "tilert_adapter.py")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_kernels_draft_from_the_first_step_on(told):
    calls, tokens = told["whole"]["calls"], len(PROMPT)
    assert calls[0] == ["inject", 61, [[tokens, 128], [tokens, 512], [tokens, 64]], 0]
    assert calls[1] == ["position", tokens - 1]
    assert calls[2][1]["top_k"] == 1
    hands = [call[1:] for call in calls if call[0] == "show_hands"]
    assert hands[0] == [[PROMPT[-1]] * 4, 1], "the last prompt token once more, and what it gives is dropped"
    assert hands[1][0] == [FIRST] * 4
    assert hands[1][1] > 1, "several steps at once, each of which drafts and verifies"
    assert calls[-1] == ["reset"]


def test_tokens_are_those_that_were_verified_after_prefills_own(told):
    whole, stopped = told["whole"], told["stopped"]
    assert whole["tokens"] == [FIRST, *range(1003, 1014)]
    assert whole["end"] == ["length", 12]
    assert stopped["tokens"] == [FIRST, *range(1003, 1007)], "the id that ends it is not sent"
    assert stopped["end"] == ["stop", 5]


def test_an_answer_that_is_cancelled_ends_and_what_it_can_is_what_tilert_says(told):
    assert told["cancelled"] == "RequestCancelled"
    assert told["features"] == ["ignore_eos", "sampling", "top_k"]
    assert told["context"] == 255
