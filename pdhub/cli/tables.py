"""What the verbs that only look print."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdhub.api import Finding
    from pdhub.config.build import Plan
    from pdhub.registry import PluginRow

_HEAD = ("KIND", "NAME", "DISTRIBUTION", "VERSION", "STABILITY", "STATUS", "SUMMARY")


def plugins_text(rows: Sequence[PluginRow], color: bool | None = None) -> str:
    """One line a plugin; a broken one is red and has its error below."""
    red, plain = ("\033[31m", "\033[0m") if (sys.stdout.isatty() if color is None else color) else ("", "")
    cells = [(r.kind, r.name, r.distribution, r.version, r.stability, r.status.value, r.summary) for r in rows]
    widths = [max(len(line[i]) for line in [_HEAD, *cells]) for i in range(len(_HEAD))]
    lines = [_line(_HEAD, widths)]
    for row, cell in zip(rows, cells, strict=True):
        text = _line(cell, widths)
        if row.error:
            text = f"{red}{text}\n    {row.error}{plain}"
        lines.append(text)
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def plugins_json(rows: Sequence[PluginRow]) -> str:
    """A JSON list with the members of :class:`pdhub.registry.PluginRow`."""
    return json.dumps([asdict(row) for row in rows], indent=2)


_COLORS = {"error": "\033[31m", "warning": "\033[33m", "info": "\033[2m"}


def findings_text(findings: Sequence[Finding], color: bool | None = None) -> str:
    """One finding a paragraph, the worst first, and a last line with the counts."""
    colored = sys.stdout.isatty() if color is None else color
    lines = []
    for finding in findings:
        start, end = (_COLORS[finding.severity.value], "\033[0m") if colored else ("", "")
        lines.append(f"{start}{finding.severity.value}{end}  {finding.where}: {finding.message}")
        if finding.fix:
            lines.append(f"    fix: {finding.fix}")
    counts = [(kind, sum(f.severity.value == kind for f in findings)) for kind in _COLORS]
    told = ", ".join(f"{n} {kind if n == 1 or kind == 'info' else kind + 's'}" for kind, n in counts if n)
    return "\n".join([*lines, told or "nothing found"])


def findings_json(findings: Sequence[Finding]) -> str:
    """A JSON list with the members of :class:`pdhub.api.Finding`."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)


def plan_text(plan: Plan) -> str:
    """The summary that ``pdhub check`` prints."""
    from pdhub.config.version import version_of

    lines = [f"ok: {plan.path or 'configuration'}", f"  model      {plan.config.model.name}"]
    for pool in plan.config.pools:
        names = ", ".join(node.name for node in pool.nodes)
        lines.append(f"  pool       {pool.name}: {plan.pools[pool.name].spec.name} on {names}")
    for prefill in plan.config.prefill:
        lines.append(f"  prefill    {prefill.name}: {plan.prefill[prefill.name].spec.name}")
    if plan.parser is not None:
        lines.append(f"  parser     {plan.parser.spec.name}")
    lines.append(f"  policy     {plan.policy.spec.name}, version {version_of(plan.config)}")
    lines.append(f"  transport  {plan.transport.spec.name}")
    lines.append(f"  router     http://{plan.config.router.host}:{plan.config.router.port}")
    return "\n".join(lines)


def values_text(values: Sequence[tuple[str, Any, str]]) -> str:
    """``path = value  # source`` lines."""
    left = [f"{path} = {json.dumps(value, default=str, ensure_ascii=False)}" for path, value, _ in values]
    width = min(60, max(map(len, left), default=0))
    return "\n".join(f"{text.ljust(width)}  # {source}" for text, (_, _, source) in zip(left, values, strict=True))


def values_json(values: Sequence[tuple[str, Any, str]]) -> str:
    """A JSON list of ``{"path", "value", "source"}``."""
    found = [{"path": path, "value": value, "source": source} for path, value, source in values]
    return json.dumps(found, indent=2, default=str)
