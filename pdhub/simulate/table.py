"""The comparison as a table for terminals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table

from pdhub.simulate.compare import Row, row
from pdhub.simulate.result import Result


def show(found: Mapping[str, Sequence[Result]], title: str, console: Console) -> None:
    """Two tables: policies side by side, times in milliseconds, and attainment by class with the use of pools."""
    rows = [row(results) for results in found.values()]
    console.print(Group(_main(rows, title), _shares(rows)))


def _main(rows: Sequence[Row], title: str) -> Table:
    table = _table(title)
    table.add_column("policy", no_wrap=True)
    for name in ("good/s", "attained", "refused", "TTFT\np50/p99", "TPOT\np50/p99", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        table.add_row(
            r.policy,
            f"{r.goodput:.3g}" + (f" ±{r.spread:.2f}" if r.spread else ""),
            f"{r.attainment:.1%}",
            f"{r.refused:.1%}",
            f"{_ms(r.ttft_p50)}/{_ms(r.ttft_p99)}",
            f"{_ms(r.tpot_p50)}/{_ms(r.tpot_p99)}",
            "-" if r.cost_per_good is None else f"{r.cost_per_good:.0f}",
        )
    return table


def _shares(rows: Sequence[Row]) -> Table:
    classes = sorted({name for r in rows for name in r.classes})
    table = _table("attainment by class; slots in use by pool")
    table.add_column("policy", no_wrap=True)
    for name in (*classes, *rows[0].utilisation):
        table.add_column(name, justify="right", overflow="fold")
    for r in rows:
        shares = [r.classes.get(name) for name in classes] + list(r.utilisation.values())
        table.add_row(r.policy, *("-" if share is None else f"{share:.1%}" for share in shares))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
