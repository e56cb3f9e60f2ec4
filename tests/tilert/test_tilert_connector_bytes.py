"""The made-up producer says, byte for byte, what TileRT's connector says for the same requests, and writes the same.

TileRT's connector needs Python 3.12 and vLLM: ``PDHUB_TILERT_CONNECTOR`` names an environment that has them, and
``tools/make_connector.py`` makes one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tilert_world import HERE, environment

LONGEST = 256
ID = "5f8e0d1c2b3a49586776859403a2b1c0"
BUSY, CANCELLING = {"error": "busy"}, {"error": "cancelling"}

# engine's id, tokens, repetition penalty, what the node answers to one connection after the other
CASES = {
    "one token": (f"cmpl-{ID}-0-1a2b3c4d", 1, 1.0, [{}]),
    "almost a page, chat": (f"chatcmpl-{ID[::-1]}-deadbeef", 63, 1.0, [{}]),
    "a page": (f"cmpl-{ID[:-1]}1-0-00000001", 64, 1.0, [{}]),
    "a page and one, penalty": (f"cmpl-{ID[:-1]}2-0-0a0b0c0d", 65, 1.25, [{}]),
    "several pages": (f"chatcmpl-{ID[:-1]}3-ffffffff", 200, 1.0, [{}]),
    "all there is room for": (f"cmpl-{ID[:-1]}4-0-12345678", LONGEST, 1.0, [{}]),
    "an id with dashes": ("chatcmpl-6f0c5a3e-1b2d-4c3b-9a8f-7e6d5c4b3a29-1a2b3c4d", 5, 1.0, [{}]),
    "an id that is cut": ("cmpl-req-1-0-1a2b3c4d", 5, 1.0, [{}]),
    "busy, then cancelling, then free": (f"cmpl-{ID[:-1]}5-0-12345678", 70, 1.1, [BUSY, CANCELLING, {}]),
    "busy for good": (f"cmpl-{ID[:-1]}6-0-12345678", 9, 1.0, [BUSY] * 5),
    "a rank that was there": (f"cmpl-{ID[:-1]}7-0-12345678", 9, 1.0, [{"error": "duplicate_rank"}]),
    "too long for it": (f"cmpl-{ID[:-1]}8-0-12345678", 9, 1.0, [{"error": "seq_len exceeds max_seq_len"}]),
    "another layout": (f"cmpl-{ID[:-1]}9-0-12345678", 9, 1.0, [{"hello": {"layout_version": 12}}]),
    "another protocol": (f"cmpl-{ID[:-1]}a-0-12345678", 9, 1.0, [{"hello": {"protocol_version": 1}}]),
    "other senders": (f"cmpl-{ID[:-1]}b-0-12345678", 9, 1.0, [{"hello": {"senders": 8}}]),
    "another transport": (f"cmpl-{ID[:-1]}c-0-12345678", 9, 1.0, [{"hello": {"transport": "mooncake"}}]),
    "room for fewer": (f"cmpl-{ID[:-1]}d-0-12345678", 9, 1.0, [{"hello": {"max_seq_len": 8}}]),
}


def interpreter():
    """Python 3.12 with vLLM, TileRT and NIXL; None = not there."""
    found = os.environ.get("PDHUB_TILERT_CONNECTOR")
    return Path(found).absolute() / "bin" / "python" if found else None


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What each sender said and wrote, one entry a connection."""
    if interpreter() is None:
        pytest.skip("PDHUB_TILERT_CONNECTOR is not set: tests/tilert/tools/make_connector.py makes that environment")
    there = tmp_path_factory.mktemp("connector")
    return {
        "stock": record(there, "stock", interpreter()),
        "synthetic": record(there, "synthetic", Path(sys.executable)),
    }


def record(there, kind, python):
    script = [how for *_, answers in CASES.values() for how in answers]
    out, log = there / f"{kind}.json", there / f"{kind}.log"
    words = [str(HERE / "tilert_recorder.py"), json.dumps(script), str(out), str(LONGEST)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, *words], env=environment(), stdout=subprocess.PIPE, stderr=errors
        ) as recorder,
    ):
        try:
            told = next(line for line in recorder.stdout if line.startswith(b"{"))  # NIXL logs there too
            port = json.loads(told)["port"]
            asked = [
                {"id": name, "prompt": [(31 * n + tokens) % 251 for n in range(tokens)], "repetition_penalty": penalty}
                for name, tokens, penalty, _ in CASES.values()
            ]
            argv = [str(python), str(HERE / "tilert_senders.py"), kind, str(port), str(LONGEST)]
            # TileRT and NIXL of the other interpreter are its own
            more = {"PYTHONPATH": str(HERE)} if kind == "stock" else {}
            sender = subprocess.run(
                argv,
                input=json.dumps(asked).encode(),
                env=environment(**more),
                stdout=errors,
                stderr=errors,
                timeout=280,
            )
            assert sender.returncode == 0, log.read_text()[-3000:]
            assert recorder.wait(60) == 0, log.read_text()[-3000:]
        finally:
            recorder.kill()
    return json.loads(out.read_text())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_messages_and_memory_are_the_same(recorded, name):
    before = 0
    for other, (*_, answers) in CASES.items():
        if other == name:
            break
        before += len(answers)
    *_, answers = CASES[name]
    for number in range(before, before + len(answers)):
        stock, mine = recorded["stock"][number], recorded["synthetic"][number]
        assert bytes.fromhex(mine["bytes"]) == bytes.fromhex(stock["bytes"])
        assert mine["memory"] == stock["memory"]


def test_the_recordings_are_of_something(recorded):
    """Accepted requests have a request and a done message, each at its place, and memory that was written."""
    script = [how for *_, answers in CASES.values() for how in answers]
    untouched = next(entry["memory"] for entry, how in zip(recorded["stock"], script, strict=True) if how)
    for entry, how in zip(recorded["stock"], script, strict=True):
        said = bytes.fromhex(entry["bytes"])
        assert (b'"done": true' in said) == (not how)
        assert (entry["memory"] != untouched) == (not how)
        assert (said == b"") == ("hello" in how)
    assert sum(b'"prompt_token_ids"' in bytes.fromhex(entry["bytes"]) for entry in recorded["stock"]) == 4
