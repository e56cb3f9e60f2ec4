"""The answers as a table for people or as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdhub.operate.quickstart.client import Answer, Question

WIDE = 140
"""Columns from which the text has a column of its own."""


def slo_text(question: Question, between: str = ", ") -> str:
    """``TTFT ≤ 2000 ms, TPOT ≤ 60 ms`` or ``none``."""
    targets = [("TTFT", question.ttft_ms), ("TPOT", question.tpot_ms)]
    return between.join(f"{name} ≤ {value:g} ms" for name, value in targets if value is not None) or "none"


def row(question: Question, answer: Answer) -> dict[str, Any]:
    """One member of the JSON list. Times in milliseconds; null = not known."""
    record = answer.record
    return {
        "slo": {"ttft_ms": question.ttft_ms, "tpot_ms": question.tpot_ms},
        "pool": record["pool"],
        "reason": record["reason"],
        "ttft_ms": record["ttft_ms"],
        "tpot_ms": record["tpot_ms"],
        "kv_bytes": record["kv_bytes"],
        "handoff_ms": record["handoff_ms"],
        "text": answer.text,
    }


def as_json(asked: Sequence[tuple[Question, Answer]]) -> str:
    return json.dumps([row(question, answer) for question, answer in asked], indent=2, ensure_ascii=False)


def _number(value: Any, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def show(asked: Sequence[tuple[Question, Answer]], console: Console) -> None:
    """Print the table; where it is too narrow for a column of text, the texts follow it."""
    wide = console.width >= WIDE
    table = Table(
        title="Where each request went, and why",
        title_justify="left",
        box=SIMPLE,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in ("SLO", "pool", "reason"):
        table.add_column(name, no_wrap=True)
    for name in ("TTFT\nms", "TPOT\nms", "KV\nbytes", "handoff\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("text", ratio=1, overflow="fold")
    for question, answer in asked:
        shown = row(question, answer)
        cells = [
            slo_text(question, ",\n"),
            str(shown["pool"]),
            str(shown["reason"]),
            _number(shown["ttft_ms"], 0),
            _number(shown["tpot_ms"], 1),
            _number(shown["kv_bytes"], 0),
            _number(shown["handoff_ms"], 1),
        ]
        table.add_row(*(Text(cell) for cell in ([*cells, _flat(answer)] if wide else cells)), end_section=True)
    console.print(table)
    if not wide:
        for question, answer in asked:
            console.print(f"{slo_text(question)} → {answer.record['pool']}: {_flat(answer)}\n", markup=False)


def _flat(answer: Answer) -> str:
    return " ".join(answer.text.split())


def curl_line(url: str, model: str, tpot_ms: float) -> str:
    """A command to copy: it takes the fast pool."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    return (
        f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' "
        f"-H 'x-slo-tpot-ms: {tpot_ms:g}' -d '{json.dumps(body)}'"
    )
