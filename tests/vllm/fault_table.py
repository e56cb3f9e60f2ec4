"""The table that the fault tests fill: printed at the end of a run, and kept by a full one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

KEPT = Path(__file__).parents[2] / "bench" / "results" / "vllm-faults.md"


@dataclass(frozen=True)
class Row:
    """``seconds``: from the fault to what the client saw. ``gauges_s``: until no surviving server runs, waits or holds
    anything; ``right``: of the next 20 requests."""

    flow: str
    fault: str
    seen: str
    seconds: float
    gauges_s: float
    right: int


TABLE: list[Row] = []


def table() -> str:
    """As Markdown."""
    lines = [
        "| flow | fault | the client sees | after | gauges idle after | next 20 right |",
        "|---|---|---|---|---|---|",
    ]
    for row in TABLE:
        lines.append(
            f"| {row.flow} | {row.fault} | {row.seen} | {row.seconds:.1f} s | {row.gauges_s:.0f} s | {row.right} |"
        )
    return "\n".join(lines)


def keep() -> None:
    """Write it beside the other measured results."""
    head = f"# Faults of real vLLM servers\n\n{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, `make test-vllm-full`.\n\n"
    KEPT.write_text(f"{head}{table()}\n")
