"""`pdhub vllm command` and `pdhub doctor` against the servers that `pdhub up` started."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest


def pdhub(*words):
    return subprocess.run([sys.executable, "-m", "pdhub", *words], capture_output=True, text=True, timeout=120)


@pytest.mark.world("tiny", "mooncake")
def test_the_printed_command_is_what_runs(world):
    for name, server in world.servers.items():
        told = json.loads(pdhub("vllm", "command", str(world.path), name, "--json").stdout)
        running = psutil.Process(server.pid)
        assert running.cmdline()[-len(told["argv"]) :] == told["argv"]
        assert told["env"].items() <= running.environ().items()


@pytest.mark.world("tiny", "mooncake", "mla")
def test_doctor_finds_no_error(world):
    found = pdhub("doctor", str(world.path))
    assert found.returncode == 0, found.stdout + found.stderr
    assert "error" not in found.stdout.lower(), found.stdout


@pytest.mark.world("tiny", "mooncake", "mla", "smol")
def test_every_pair_passed_its_self_check(world):
    wanted = {f"prefill-{pool} → {pool}": "good" for pool in world.pools if pool != "whole"}
    assert world.ready()["pairs"] == wanted
