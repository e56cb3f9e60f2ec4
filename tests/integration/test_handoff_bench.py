"""``pdhub handoff-bench`` over the built-in transports, two processes each."""

import json
from dataclasses import replace

import pytest

from pdhub.api.errors import TransferFailed
from pdhub.cli import main
from pdhub.measure.handoff import Bench, Work
from pdhub.measure.layouts import layout
from pdhub.registry import load
from pdhub.testing.faults import Faults, FaultyTransport

pytestmark = pytest.mark.integration

SMALL = ["--layout", "smollm2-135m", "--tokens", "200", "--chunk", "64", "--prefill", "10000", "--runs", "2"]


def run(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main(["handoff-bench", *words])
    out, err = capsys.readouterr()
    return end.value.code, out, err


def test_json_has_every_figure(capsys):
    code, out, _ = run(capsys, "-t", "shm", "-t", "tcp", *SMALL, "--json", "-o", "tcp.buffer_bytes=65536")
    assert code == 0
    rows = json.loads(out)["results"]
    assert [row["transport"] for row in rows] == ["shm", "tcp"]
    for row in rows:
        assert row["verified"] is True
        assert row["bytes"] == 13 * 30 * 2 * 3 * 16 * 64 * 2  # 200 tokens fill 13 blocks of 16
        assert row["writes"] == 4
        assert row["runs"] == 2
        assert row["gb_s_slowest"] <= row["gb_s"] <= row["gb_s_fastest"]
        assert row["prefill_s"] == pytest.approx(0.02)
        assert 0 < row["exposed_s"] < 60
        assert 0 < row["exposed_if_sent_at_the_end_s"] < 60
        assert row["sender_cpu_s"] > 0


def test_the_table_names_transport_and_layout(capsys):
    code, out, _ = run(capsys, "--layer-major", *SMALL)
    assert code == 0
    for word in ("smollm2-135m", "shm", "GB/s", "exposed", "bytes compared"):
        assert word in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-t", "carrier-pigeon"], "carrier-pigeon"),
        (["--layout", "none-such"], "llama-3.1-8b"),
        (["--chunk", "17"], "multiple of 16"),
        (["-o", "no_such=1"], "no_such"),
        (["-o", "words"], "KEY=VALUE"),
        (["-t", "shm", "--target", "cuda:0"], "cuda:0"),
        (["-t", "shm", "--source", "cuda:0"], "--source: shm has cpu memory only, not cuda:0"),
    ],
)
def test_mistakes_are_named(capsys, words, said):
    code, out, err = run(capsys, *words)
    assert code != 0
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_a_target_that_cannot_listen_says_why(capsys):
    code, _, err = run(capsys, "-t", "tcp", *SMALL, "-o", "host=192.0.2.1")
    assert code != 0
    assert "cannot listen on 192.0.2.1" in err


def test_damaged_bytes_are_found():
    spec = load(warn=False).transport("shm")
    flips = replace(spec, factory=lambda config: FaultyTransport(spec.factory(config), Faults(flip=1)))
    bench = Bench(flips, {}, Work(layout("smollm2-135m"), 200, 64, 10_000))
    try:
        with pytest.raises(TransferFailed, match="not what was sent"):
            bench.run(1)
    finally:
        bench.close()
