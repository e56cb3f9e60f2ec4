"""The comparison as a table for terminals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.table import Table

from pdhub.simulate.compare import Row, row
from pdhub.simulate.result import Result


def show(found: Mapping[str, Sequence[Result]], title: str, console: Console) -> None:
    """Two tables: policies side by side, times in milliseconds, and attainment by class with the use of pools."""
    rows = [row(results) for results in found.values()]
    console.print(Group(_main(rows, title), _shares(rows)))


def _main(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for name in ("good/s", "±", "attained", "refused", "TTFT p50", "p99", "TPOT p50", "p99", "cost"):
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(
            r.policy,
            f"{r.goodput:.3g}",
            f"{r.spread:.2g}",
            f"{r.attainment:.1%}",
            f"{r.refused:.1%}",
            *(_ms(value) for value in (r.ttft_p50, r.ttft_p99, r.tpot_p50, r.tpot_p99)),
            "-" if r.cost_per_good is None else f"{r.cost_per_good:.0f}",
        )
    return table


def _shares(rows: Sequence[Row]) -> Table:
    classes = sorted({name for r in rows for name in r.classes})
    table = Table(title="attainment by class; slots in use by pool", title_justify="left")
    table.add_column("policy")
    for name in (*classes, *rows[0].utilisation):
        table.add_column(name, justify="right", overflow="fold")
    for r in rows:
        shares = [r.classes.get(name) for name in classes] + list(r.utilisation.values())
        table.add_row(r.policy, *("-" if share is None else f"{share:.1%}" for share in shares))
    return table


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
