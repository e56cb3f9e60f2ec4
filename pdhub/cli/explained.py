"""``pdhub explain``: reads what was asked, prints what would be decided."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdhub.api.errors import ConfigError

if TYPE_CHECKING:
    from pdhub.router.explain import Explanation


def read_request(path: str) -> bytes:
    """The body: a file, or standard input for ``-``. Raises ConfigError."""
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        hint = "give a file with the JSON body of a request, or - for standard input"
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", hint=hint) from None


def read_headers(lines: Sequence[str]) -> dict[str, str]:
    """``NAME: VALUE`` lines; of a repeated header the first counts, as in the router. Raises ConfigError."""
    out: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"'{line}' is no header", hint="write it as 'x-slo-tpot-ms: 10'")
        out.setdefault(name.strip().lower(), value.strip())
    return out


def read_moment(text: str | None) -> float | None:
    """Epoch seconds of an ISO 8601 moment; without an offset it is local time. Raises ConfigError."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        raise ConfigError(f"'{text}' is no moment", hint="write it as 2026-01-31T22:15+01:00") from None


def explained_json(explanation: Explanation) -> str:
    """A JSON object with ``pool``, ``node``, ``reason``, ``candidates`` and more: see docs/policy.md."""
    return json.dumps(explanation.document(), indent=2, ensure_ascii=False)


def explained_text(explanation: Explanation, width: int | None = None) -> str:
    """The decision, the request as the policy saw it, and a table of all nodes, best first."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    document = explanation.document()
    table = Table("", "pool", "node", "TTFT", "TPOT", "why", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, row in enumerate(_ranked(document), 1):
        seen = row["predicted"] or {}
        style = None if row["kept"] else "dim"
        mark = str(place) if row["kept"] else "–"
        times = _ms(seen.get("ttft_ms")), _ms(seen.get("tpot_ms"))
        table.add_row(mark, row["pool"], row["node"], *times, _why(row), style=style)
    columns = width or max(80, shutil.get_terminal_size().columns)
    console = Console(file=StringIO(), width=columns, color_system=None, highlight=False, markup=False)
    for line in _head(document):
        console.print(line, soft_wrap=True)
    console.print(table)
    for line in _tail(document):
        console.print(line, soft_wrap=True)
    file = console.file
    assert isinstance(file, StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _head(document: Mapping[str, Any]) -> list[str]:
    chosen = f"{document['pool']} / {document['node']}" if document["pool"] else "nobody"
    request, slo = document["request"], document["request"]["slo"]
    kind = request["endpoint"].removeprefix("/v1/").replace("/", " ")
    wants = [f"~{request['prompt_tokens']} prompt tokens", f"at most {request['max_tokens'] or 'all'} of output"]
    wants += [f"{name.upper()} {_ms(slo[f'{name}_ms'])}" for name in ("ttft", "tpot") if slo[f"{name}_ms"] is not None]
    if slo["source"] != "none":
        wants[-1] += f" (from {slo['source']})"
    named = f"class {slo['slo_class']}" if slo["slo_class"] else "no class"
    trust = {"clamp": " (clamped)", "strip": " (its wishes are ignored)"}.get(document["trust"], "")
    wants += [named, f"tenant {request['tenant']}{trust}", f"priority {request['priority']}"]
    rule = f", rule {document['rule']}" if document["rule"] else ""
    lines = [
        f"{chosen}    {document['reason']}",
        f"  policy    {document['policy']}{rule}, version {document['version']}",
        f"  request   {kind}: {', '.join(wants)}",
    ]
    if door := document["door"]:
        waits = f"{door['ahead']} ahead, {_ms(door['wait_ms'])} to wait" if door["pool"] else ""
        lines.append(f"  door      {door['pool'] or 'none'}    {door['refused'] or waits}")
    if handoff := document["handoff"]:
        when = "before prefill" if handoff["bind"] == "early" else "again after prefill"
        prefill = handoff["prefill"] or "nobody"
        lines.append(f"  prefill   {prefill}    {handoff['reason']}; the node is chosen {when}")
    if request["features"]:
        lines.append(f"  needs     {', '.join(request['features'])}")
    if document["invalid"]:
        lines.append(f"  ignored   {', '.join(document['invalid'])}: cannot be read")
    if document["shadow"]:
        other = document["shadow"]
        chosen = f"{other['pool']} / {other['node']}" if other["pool"] else "nobody"
        lines.append(f"  shadow    {chosen}    {other['reason']}, policy {other['policy']}")
    return lines


def _tail(document: Mapping[str, Any]) -> list[str]:
    return [f"assumed: {'; '.join(document['assumed'])}"] if document["assumed"] else []


def _ranked(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    places = {tuple(pair): place for place, pair in enumerate(document["order"])}
    rows: list[dict[str, Any]] = document["candidates"]
    return sorted(rows, key=lambda r: (places.get((r["pool"], r["node"]), len(places)), r["pool"], r["node"]))


def _why(row: Mapping[str, Any]) -> str:
    if not row["kept"]:
        return f"{row['dropped_by']}: {row['why']}" if row["why"] else str(row["dropped_by"])
    scores = " ".join(f"{name}={value:g}" for name, value in row["scores"].items() if value is not None)
    return f"{row['why']} {scores}".strip()


def _ms(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g} ms"
