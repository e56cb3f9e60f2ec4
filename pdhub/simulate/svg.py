"""Plots as SVG text: grouped bars and lines. No scripts, no fonts, nothing loaded from anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#2f6fde", "#d9622b", "#2a9d6f", "#9a4fd0", "#c2a013", "#d13d6e", "#4aa3b8", "#7a7a7a")
WIDTH, HEIGHT = 720, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 14, 40

Points = Sequence[tuple[float, float]]


def colour(index: int) -> str:
    """The same policy has the same colour in every plot."""
    return COLOURS[index % len(COLOURS)]


def legend(names: Sequence[str]) -> str:
    """HTML that goes with all plots of a page."""
    keys = (f'<span class="key"><i style="background:{colour(i)}"></i>{escape(n)}</span>' for i, n in enumerate(names))
    return f'<p class="legend">{"".join(keys)}</p>'


def bars(
    groups: Mapping[str, Sequence[float]], names: Sequence[str], *, top: float | None = None, unit: str = ""
) -> str:
    """Args:
    groups: values by group, one a name. top: end of the axis; None = the largest value.
    """
    highest = top or max((v for values in groups.values() for v in values), default=1.0) or 1.0
    ticks = _ticks(0.0, highest)
    highest = max(highest, ticks[-1])
    parts = [_grid_y(ticks, highest, unit)]
    room = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    width = min(48.0, room * 0.84 / max(1, len(names)))
    for g, (group, values) in enumerate(groups.items()):
        middle = LEFT + room * (g + 0.5)
        for i, value in enumerate(values):
            x = middle + (i - len(values) / 2) * width
            tall = (HEIGHT - TOP - BOTTOM) * min(value, highest) / highest
            y = HEIGHT - BOTTOM - tall
            shown = _number(value, unit)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 2:.1f}" height="{tall:.1f}" fill="{colour(i)}">'
                f"<title>{escape(names[i])}, {escape(group)}: {shown}</title></rect>"
            )
            if width >= 30:
                parts.append(f'<text x="{x + width / 2 - 1:.1f}" y="{y - 3:.1f}" class="value">{shown}</text>')
        parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" class="x">{escape(group)}</text>')
    return _svg(parts)


def lines(
    curves: Sequence[tuple[int, Points]],
    *,
    log: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    x_unit: str = "",
    y_unit: str = "",
    y_top: float | None = None,
) -> str:
    """Args:
    curves: colour index and points. log: logarithmic x. marks: vertical lines with a label.
    """
    xs = [x for _, points in curves for x, _ in points if x > 0 or not log] + [x for x, _ in marks]
    ys = [y for _, points in curves for _, y in points]
    if not xs or not ys:
        return '<p class="empty">nothing completed</p>'
    low, high = min(xs), max(xs)
    if high <= low:
        high = low * 1.1 + 1e-9
    top = y_top or max(ys) or 1.0

    def place(x: float) -> float:
        share = math.log(max(x, low) / low) / math.log(high / low) if log else (x - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def height(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, y / top)

    parts = [_grid_y(_ticks(0.0, top), top, y_unit)]
    for x in _decades(low, high) if log else _ticks(low, high):
        if low <= x <= high:
            at = place(x)
            parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="grid"/>')
            parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" class="x">{_number(x, x_unit)}</text>')
    for x, label in marks:
        at = place(x)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="mark"/>')
        parts.append(f'<text x="{at - 4:.1f}" y="{TOP + 10}" class="marked">{escape(label)}</text>')
    for index, points in curves:
        path = " ".join(f"{place(x):.1f},{height(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour(index)}" stroke-width="1.8"/>')
    return _svg(parts)


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _grid_y(ticks: Sequence[float], top: float, unit: str) -> str:
    parts = []
    for value in ticks:
        if value > top * 1.0001:
            continue
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="y">{_number(value, unit)}</text>')
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    rough = (high - low) / 5 or 1.0
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round((first + i) * step, 12) for i in range(12) if (first + i) * step <= high + step * 1e-6]


def _decades(low: float, high: float) -> list[float]:
    found = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        steps = (1, 2, 5) if high / low < 1000 else (1,)
        found += [m * 10.0**power for m in steps]
    return found


def _number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value * 100:.0f}%"
    text = f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return f"{text}{unit}"
