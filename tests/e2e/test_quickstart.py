"""`pdhub quickstart` and `pdhub up` as a person runs them."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
MEMBERS = {"slo", "pool", "reason", "ttft_ms", "tpot_ms", "kv_bytes", "handoff_ms", "text"}


def pdhub(*words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdhub", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(1)
        yield sock.getsockname()[1]


@pytest.mark.e2e
def test_a_taken_port_is_an_error_before_anything_starts(taken: int) -> None:
    done = pdhub("up", "configs/quickstart.yaml", "--set", f"router.port={taken}", timeout=60)
    assert done.returncode == 2
    assert f"router.port: router cannot listen on 127.0.0.1:{taken}: Address already in use" in done.stderr
    assert "starting" not in done.stdout + done.stderr


@pytest.mark.e2e
@pytest.mark.model
def test_a_taken_quickstart_port_too(taken: int) -> None:
    done = pdhub("quickstart", "--once", "--port", str(taken), timeout=60)
    assert done.returncode == 2
    assert "Address already in use" in done.stderr


@pytest.mark.e2e
@pytest.mark.model
@pytest.mark.timeout(300)
def test_once_and_json_print_a_list_and_nothing_else() -> None:
    done = pdhub("quickstart", "--once", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 3
    assert all(set(row) == MEMBERS for row in rows)
    assert [row["pool"] for row in rows] == ["fast", "general", "general"]
    assert rows[0]["reason"] in ("slo-met", "slo-least-miss")
    assert [row["reason"] for row in rows[1:]] == ["slo-met", "no-slo"]
    assert rows[0]["slo"]["tpot_ms"] is not None
    assert rows[2]["slo"] == {"ttft_ms": None, "tpot_ms": None}
    for row in rows:
        assert row["text"].strip()
        assert row["ttft_ms"] > 0
        assert row["tpot_ms"] > 0
        assert row["kv_bytes"] > 0
        assert row["handoff_ms"] >= 0
    assert "TPOT with 4 general requests running: fast" in done.stderr


@pytest.mark.e2e
@pytest.mark.model
@pytest.mark.timeout(300)
def test_it_stays_up_answers_and_one_ctrl_c_stops_all(tmp_path: Path) -> None:
    out = tmp_path / "out"
    err = tmp_path / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        command = [sys.executable, "-m", "pdhub", "quickstart", "--prompt", "Say hello."]
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, cwd=ROOT)
    try:
        deadline = time.monotonic() + 240
        while not (said := re.search(r"serving smollm2 at (http://127\.0\.0\.1:\d+)/v1", err.read_text())):
            assert process.poll() is None, err.read_text()
            assert time.monotonic() < deadline, err.read_text()
            time.sleep(0.2)
        assert "Where each request went, and why" in out.read_text()
        assert "curl -N " + said[1] in err.read_text()
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        request = urllib.request.Request(
            said[1] + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] <= 4
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) == 8  # prefill, two nodes and the router, each behind its guard
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert not any(child.is_running() for child in below)
    finally:
        process.kill()
        process.wait()
