"""KV handoff under faults: at every state of a lease many random trials with real processes.

    python tests/safety/run_safety.py [--trials 500] [--transports shm,tcp] [--states …] [--trees 2] [--seed 1]
                                      [--out FILE]

Each trial brings requests into the state (router, node and two senders are processes; the senders' transport goes wrong
on request), then kills or stops one of them, spoils the wire or lets the clients leave, and checks: every answer is
right or an error; no landing ever holds a byte of another request; leases, slots, staging and open files are as before;
the next answers are right. Status 1 if anything was not so; each finding has the seed of its trial.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safety_results import keep
from safety_run import Run
from safety_trials import STATES, Result

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500, help="of each state, in equal parts on the transports")
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--states", default=",".join(STATES))
    parser.add_argument("--trees", type=int, default=2, help="at once, of each transport")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, to repeat one")
    parser.add_argument("--out", type=Path, help="JSON; the run is added to it")
    args = parser.parse_args()
    transports = args.transports.split(",")
    began, commit, done = time.monotonic(), _commit(), 0

    def told(result: Result) -> None:
        nonlocal done
        done += 1
        if result.wrong or done % 50 == 0:
            print(f"{done} trials; {result.seed}: {result.fault} {result.wrong}", file=sys.stderr, flush=True)
            if args.out is not None:
                keep(args.out, document())

    run = Run(
        transports, args.states.split(","), -(-args.trials // len(transports)),
        base=args.seed, first=args.first, trees=args.trees, told=told,
    )  # fmt: skip

    def document() -> dict[str, Any]:
        return {
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "commit": commit,
            "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
            "command": " ".join(["tests/safety/run_safety.py", *sys.argv[1:]]),
            "seconds": round(time.monotonic() - began),
            "landings": dict(run.counts),
            "wrong": run.wrong,
            "states": run.table(),
        }

    asyncio.run(run.run())
    if args.out is not None:
        keep(args.out, document())
    print(json.dumps(document(), indent=1))
    return 1 if run.wrong else 0


def _commit() -> str:
    changes = _git("status", "--porcelain", "-uno", "--", "pdhub", "tests/safety")
    return _git("rev-parse", "--short=12", "HEAD") + ("+changes" if changes else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
