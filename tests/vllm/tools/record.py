"""Run all tests on real vLLM and keep what they wrote, with date, commit and machine, in ``bench/results/``."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[3]


def main(words: list[str]) -> int:
    now = datetime.now(UTC)
    commit = _git("rev-parse", "--short=12", "HEAD") + ("+changes" if _git("status", "--porcelain", "-uno") else "")
    command = [sys.executable, "-m", "pytest", "tests/vllm", "--vllm-full", "-v", "--durations=15", *words]
    out = ROOT / "bench" / "results" / "vllm-full.txt"
    head = (
        f"date     {now:%Y-%m-%d %H:%M} UTC\ncommit   {commit}\n"
        f"machine  {os.cpu_count()} cores, {_model()}, Python {platform.python_version()}\n"
        f"command  pytest {' '.join(command[3:])}\n\n"
    )
    lines: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line.replace(str(ROOT), "."))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(head + "".join(lines))
    return running.returncode


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
