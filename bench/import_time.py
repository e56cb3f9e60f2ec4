"""How long ``import pdhub`` takes in a fresh interpreter, over an empty one. Goal: below 100 ms.

python bench/import_time.py [--runs 20]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time


def milliseconds(statement: str, runs: int) -> float:
    """Median wall time of an interpreter that runs ``statement``."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    empty = milliseconds("pass", runs)
    for statement in ("import pdhub", "import pdhub.api", "import pdhub.registry as r; r.load(warn=False)"):
        print(f"{statement:48} {milliseconds(statement, runs) - empty:7.1f} ms over an empty interpreter ({empty:.1f})")


if __name__ == "__main__":
    main()
