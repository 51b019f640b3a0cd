"""An SVG plot without a plotting library: points and lines on two logarithmic axes.

This module does not know what was measured.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 460, 380  # of one panel
LEFT, TOP, RIGHT, BOTTOM = 62, 52, 444, 328  # of the frame in it
COLORS = ("#1f77b4", "#d62728", "#2ca02c")


class Series(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]
    line: Sequence[tuple[float, float]]


class Panel(NamedTuple):
    x_label: str
    series: Sequence[Series]


def draw(title: str, y_label: str, panels: Sequence[Panel]) -> str:
    y_ticks = _ticks([y for p in panels for s in p.series for _, y in (*s.points, *s.line)])
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
        _text(16, 20, title, "start"),
    ]
    for i, panel in enumerate(panels):
        parts += [f'<g transform="translate({i * WIDTH} 0)">', *_panel(panel, y_ticks)]
        parts += [_text(16, TOP - 12, y_label, "start"), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, y_ticks: Sequence[float]) -> list[str]:
    x_ticks = sorted({x for series in panel.series for x, _ in series.points})
    at_x, at_y = _scale(x_ticks, LEFT, RIGHT), _scale(y_ticks, BOTTOM, TOP)
    parts = [_text((LEFT + RIGHT) / 2, BOTTOM + 38, panel.x_label)]
    for tick in y_ticks:
        parts.append(f'<path d="M{LEFT} {at_y(tick)}H{RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, at_y(tick) + 4, f"{tick:g}", "end"))
    for tick in x_ticks:
        shown = f"{tick / 1024:g}k" if tick >= 1024 else f"{tick:g}"
        parts.append(f'<path d="M{at_x(tick)} {TOP}V{BOTTOM}" stroke="#ddd"/>')
        parts.append(_text(at_x(tick), BOTTOM + 18, shown))
    for i, (name, points, line) in enumerate(panel.series):
        color, corners = COLORS[i], " ".join(f"{at_x(x)},{at_y(y)}" for x, y in line)
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{color}"/>')
        parts += [
            f'<circle cx="{at_x(x)}" cy="{at_y(y)}" r="3.5" fill="{color}"/>' for x, y in points
        ]
        parts.append(_text(LEFT + 8, TOP + 18 + 16 * i, name, "start", color))
    return parts


def _scale(ticks: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """Return a logarithmic scale that maps the first tick to `start` and the last to `end`."""
    span = math.log(ticks[-1] / ticks[0]) or 1.0
    return lambda value: round(start + math.log(value / ticks[0]) / span * (end - start), 1)


def _ticks(values: Sequence[float]) -> list[float]:
    """Return ticks 1, 2, 5, 10, ... that enclose all values."""
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    every = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    first = max(i for i, tick in enumerate(every) if tick <= min(values))
    last = min(i for i, tick in enumerate(every) if tick >= max(values))
    return every[first : last + 1]


def _text(x: float, y: float, text: str, anchor: str = "middle", color: str = "#333") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
