"""KV planes that pdhub's sender writes are those that TileRT's own code writes, byte for byte. See tilert_bytes.py."""

import functools
import json
import os
import subprocess
import sys

import pytest
from tilert_world import HERE, site

LENGTHS = [1, 63, 64, 65, 127, 128, 129]
LAYERS = {"dsv32": 61, "glm5": 79, "glm5_2": 79}
ROW = {"fp8_ds_mla": 528, "bf16": 1024}

CASES = [[name, dtype, n, "plain"] for name in ("dsv32", "glm5") for dtype in ROW for n in LENGTHS]
CASES += [[name, dtype, 150, "tail"] for name in ("dsv32", "glm5") for dtype in ROW]
CASES += [["glm5_2", dtype, 130, kind] for dtype in ROW for kind in ("plain", "tail")]
CASES += [[name, "fp8_ds_mla", 100, "ue8m0"] for name in LAYERS]


@functools.cache
def compared(shards, name):
    """Every case of a profile, from one process; by its own words."""
    cases = [case for case in CASES if case[0] == name] + [[name, "fp8_ds_mla", 20, "damaged"]]
    env = {
        **os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{site()}", "TILERT_PD_SENDERS": str(shards),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = [sys.executable, str(HERE / "tilert_bytes.py"), json.dumps(cases)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(told) == len(cases)
    return {json.dumps(one["case"]): one for one in told}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_plane_of_every_shard_is_the_same(case, shards):
    name, dtype, tokens, _ = case
    told = compared(shards, name)[json.dumps(case)]
    assert told["different"] == []
    assert told["converted"], "and what TileRT is given, too"
    assert told["answer"] == [7, 11, 22, 33], "from its stub engine"
    assert told["extraction"] == "fast", "TileRT's usual way, not its fallback"
    pages = -(-tokens // 64)
    places = -(-LAYERS[name] // shards)
    assert told["bytes"] == shards * places * pages * (64 * (ROW[dtype] + 128) + 8448)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("name", list(LAYERS))
def test_one_other_bit_is_seen(name, shards):
    told = compared(shards, name)[json.dumps([name, "fp8_ds_mla", 20, "damaged"])]
    assert told["different"] == [f"pe of shard {3 % shards}"]
    assert not told["converted"]
