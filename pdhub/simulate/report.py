"""The comparison as one HTML page with plots; it needs nothing but itself."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape

from pdhub.simulate import svg
from pdhub.simulate.compare import Row, row
from pdhub.simulate.result import Result

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #777 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.35rem } h2 { font-size: 1.05rem; margin: 2rem 0 .3rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left } .wide { overflow-x: auto }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 1rem }
figure { margin: 0 } figcaption { font-size: .85rem; color: var(--soft) } svg { width: 100%; height: auto }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft) } .x, .value { text-anchor: middle }
.y, .marked { text-anchor: end } .grid { stroke: var(--line) } .mark { stroke: #c33; stroke-dasharray: 4 3 }
.key { margin-right: 1rem } .key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em }
.empty, .note { color: var(--soft) } .legend { position: sticky; top: 0; background: Canvas; padding: .3rem 0 }
"""


def page(found: Mapping[str, Sequence[Result]], title: str) -> str:
    """Args:
    found: runs by policy, as :func:`pdhub.simulate.compare.compare` gives them.
    """
    names = list(found)
    rows = [row(results) for results in found.values()]
    classes = sorted({name for r in rows for name in r.classes})
    pools = list(rows[0].utilisation)
    parts = [
        f"<h1>{escape(title)}</h1>",
        '<p class="note">Simulated: real policy, admission and latency-model code against cost models. '
        "A request is good if it completed and met every target it had; goodput is good requests a second.</p>",
        svg.legend(names),
        _table(rows),
        "<h2>Goodput and attainment</h2>",
        '<div class="plots">',
        _figure("goodput, requests a second", svg.bars({"goodput": [r.goodput for r in rows]}, names)),
        _figure(
            "attainment by class",
            svg.bars({c: [r.classes.get(c, 0.0) for r in rows] for c in classes}, names, top=1.0, unit="%"),
        ),
        _figure(
            "slots in use by pool",
            svg.bars({p: [r.utilisation[p] for r in rows] for p in pools}, names, top=1.0, unit="%"),
        ),
        _figure("cost of a good request", svg.bars({"cost": [r.cost_per_good or 0.0 for r in rows]}, names)),
        _figure("good share of the requests that came at that second", _over_time(found)),
        "</div>",
    ]
    for metric, label in (("ttft", "Time to first token"), ("tpot", "Time per output token")):
        parts.append(f"<h2>{label}, share of completed requests up to that many milliseconds</h2>")
        parts.append('<div class="plots">')
        parts += [_figure(name, _distribution(found, metric, name)) for name in classes]
        parts.append("</div>")
    parts += ["<h2>Refused, and why requests went where they went</h2>", _reasons(found)]
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def _figure(caption: str, plot: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{plot}</figure>"


def _table(rows: Sequence[Row]) -> str:
    heads = ("policy", "goodput /s", "± seeds", "offered /s", "attained", "refused", "TTFT p50", "TTFT p99", "TPOT p50")
    body = []
    for r in rows:
        cells = (
            r.policy, f"{r.goodput:.3f}", f"{r.spread:.3f}", f"{r.offered:.2f}", f"{r.attainment:.1%}",
            f"{r.refused:.1%}", _ms(r.ttft_p50), _ms(r.ttft_p99), _ms(r.tpot_p50), _ms(r.tpot_p99),
            "-" if r.cost_per_good is None else f"{r.cost_per_good:.0f}",
        )  # fmt: skip
        body.append(_line(cells))
    return f'<div class="wide"><table>{_line((*heads, "TPOT p99", "cost/good"), "th")}{"".join(body)}</table></div>'


def _over_time(found: Mapping[str, Sequence[Result]]) -> str:
    curves = []
    for index, results in enumerate(found.values()):
        steps = min(len(r.series) for r in results)
        points = []
        for i in range(steps):
            came = sum(r.series[i][1] for r in results)
            if came:
                at = statistics.fmean(r.series[i][0] for r in results)
                points.append((at, sum(r.series[i][2] for r in results) / came))
        curves.append((index, points))
    return svg.lines(curves, x_unit="s", y_unit="%", y_top=1.0)


def _distribution(found: Mapping[str, Sequence[Result]], metric: str, name: str) -> str:
    curves, target = [], None
    for index, results in enumerate(found.values()):
        mine = [r.curves[f"{metric} {name}"] for r in results if r.curves.get(f"{metric} {name}")]
        if mine:
            values = [statistics.fmean(column) for column in zip(*mine, strict=True)]
            curves.append((index, [(max(v, 0.01), i / (len(values) - 1)) for i, v in enumerate(values)]))
        for r in results:
            target = r.targets.get(name, {}).get(metric, target)
    marks = [(target, f"target {target:g}")] if target is not None else []
    return svg.lines(curves, log=True, marks=marks, y_unit="%", y_top=1.0)


def _reasons(found: Mapping[str, Sequence[Result]]) -> str:
    lines = [_line(("policy", "reason", "requests", "share"), "th")]
    for name, results in found.items():
        counts: dict[str, int] = {}
        for r in results:
            for reason, count in r.reasons.items():
                counts[reason] = counts.get(reason, 0) + count
        total = sum(counts.values()) or 1
        for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
            lines.append(_line((name, reason, str(count), f"{count / total:.1%}")))
    return f"<table>{''.join(lines)}</table>"


def _line(cells: Sequence[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(c)}</{tag}>' for c in cells)}</tr>"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
