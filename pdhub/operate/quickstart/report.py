"""The answers as a table for people or as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from pdhub.operate.quickstart.client import Answer, Question


def slo_text(question: Question) -> str:
    """``TTFT ≤ 2000 ms, TPOT ≤ 60 ms`` or ``none``."""
    targets = [("TTFT", question.ttft_ms), ("TPOT", question.tpot_ms)]
    return ", ".join(f"{name} ≤ {value:g} ms" for name, value in targets if value is not None) or "none"


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


def as_table(asked: Sequence[tuple[Question, Answer]]) -> Table:
    table = Table(title="Where each request went, and why", title_justify="left")
    for name in ("SLO", "pool", "reason"):
        table.add_column(name)
    for name in ("TTFT ms", "TPOT ms", "KV bytes", "handoff ms"):
        table.add_column(name, justify="right")
    table.add_column("text", ratio=1, overflow="fold")
    for question, answer in asked:
        shown = row(question, answer)
        table.add_row(
            slo_text(question),
            str(shown["pool"]),
            str(shown["reason"]),
            _number(shown["ttft_ms"], 0),
            _number(shown["tpot_ms"], 1),
            _number(shown["kv_bytes"], 0),
            _number(shown["handoff_ms"], 1),
            " ".join(answer.text.split()),
        )
    return table


def curl_line(url: str, model: str) -> str:
    """A command to copy: it takes the fast pool."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    return (
        f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' "
        f"-H 'x-slo-tpot-ms: 60' -d '{json.dumps(body)}'"
    )
