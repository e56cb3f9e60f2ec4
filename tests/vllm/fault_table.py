"""The table that the fault tests fill: printed at the end of a run, and kept by a full one."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

FLOWS = ("pull", "push", "mooncake", "pdhub shm", "pdhub tcp")
TITLE = """# Faults of real vLLM servers

Written by `make test-vllm-full`: tiny Qwen3, vLLM 0.32 on a CPU. *After* counts from the fault to what the client
sees. *Decode started again*: `pdhub up` did so, for KV that nobody would have freed within a minute. In the flows
`pdhub …` vLLM prefills for a `pdhub node`: each kill came while a lease of the node was in the state named, times are
the longest of the kills, and 6 answers were asked for after each, else 20."""
KEPT = Path(__file__).parents[2] / "bench" / "results" / "vllm-faults.md"


@dataclass(frozen=True)
class Row:
    """``seconds``: from the fault to what the client saw. ``gauges_s``: until no surviving server runs, waits or holds
    anything; ``right``: of the next requests; ``again``: the tree started decode again for what it held."""

    flow: str
    fault: str
    seen: str
    seconds: float
    gauges_s: float
    right: int
    again: bool = False


TABLE: list[Row] = []
HEAD = ["| flow | fault | the client sees | after | gauges idle after | next ones right |", f"|{'---|' * 6}"]


def line(row: Row) -> str:
    """As Markdown."""
    gauges = f"{row.gauges_s:.0f} s{', decode started again' if row.again else ''}"
    return f"| {row.flow} | {row.fault} | {row.seen} | {row.seconds:.1f} s | {gauges} | {row.right} |"


def table() -> str:
    """Of this run, as Markdown."""
    return "\n".join([*HEAD, *map(line, TABLE)])


def keep() -> None:
    """Write the rows beside the other measured results, each with date and commit. A run of some of the tests replaces
    their rows and leaves the others."""
    run = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {_commit()}"
    found = {}
    if KEPT.exists():
        for old in KEPT.read_text().splitlines():
            cells = [cell.strip() for cell in old.strip("| ").split("|")]
            if old.startswith("|") and len(cells) == 7 and cells[0] != "flow" and "---" not in old:
                found[cells[0], cells[1]] = old
    for row in TABLE:
        found[row.flow, row.fault] = f"{line(row)} {run} |"
    head = [f"{HEAD[0]} run |", f"{HEAD[1]}---|"]
    lines = [*head, *(found[key] for key in sorted(found, key=lambda key: (FLOWS.index(key[0]), key[1])))]
    KEPT.write_text(f"{TITLE}\n\n" + "\n".join(lines) + "\n")


def _commit() -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, cwd=KEPT.parent, capture_output=True, text=True, check=True).stdout.strip()
