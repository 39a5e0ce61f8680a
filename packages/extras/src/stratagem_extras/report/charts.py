"""Line charts of metrics: how values are chosen, scaled and drawn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, isfinite, log10

from stratagem_extras.page import COLORS, color, svg
from stratagem_extras.report.logs import Run, Series

POINTS = 400
"""The most points of a drawn line; a longer series is drawn by the extremes of its parts."""

_WIDTH, _HEIGHT = 400, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 10, 26
_DASHES = ("", "6 3", "2 3", "8 3 2 3")

# title of a group, pattern of a metric's name; the first group that matches wins
_GROUPS = (
    ("Step times by rank", r"rank.?\d+.*(time|second|_s\b|_ms\b)|(time|second).*rank.?\d+"),
    ("Learning rates", r"^lr\b|^lr-|learning_rate|momentum|weight_decay"),
    ("Memory", r"bytes|memory|_mem\b"),
    ("Goodput", r"^goodput"),
    ("Throughput", r"per_sec|per_second|/mfu|throughput|it/s|samples/s"),
    ("Validation and test", r"^(val|valid|validation|test)[_/]"),
    ("Losses", r"loss|perplexity|nll"),
    ("Other values", r""),
)
_RANK = re.compile(r"rank.?\d+")


@dataclass
class Line:
    """A line of a chart.

    Attributes:
        label: the meaning of the line, if the chart has several.
        look: the number of its color and dashes.
        series: its values.
    """

    label: str
    look: int
    series: Series


@dataclass
class Chart:
    """A chart: a metric of all runs, or a metric of all ranks.

    Attributes:
        name: the metric.
        lines: a line for each run, or for each run and rank.
        marks: steps at which a run was resumed, with the look of the run.
    """

    name: str
    lines: list[Line]
    marks: list[tuple[float, int]]


def grouped(runs: Sequence[Run]) -> dict[str, list[Chart]]:
    """Return the charts of runs by the title of their group; charts of one metric are merged."""
    charts: dict[str, dict[str, Chart]] = {title: {} for title, _ in _GROUPS}
    marks = [(step, look) for look, run in enumerate(runs) for step in run.resumed]
    for look, run in enumerate(runs):
        for name, series in run.series.items():
            if name == "epoch":
                continue
            title = next(title for title, pattern in _GROUPS if re.search(pattern, name, re.I))
            chart_name, label, line_look = name, run.name, look
            if title == _GROUPS[0][0]:
                chart_name = _RANK.sub("rank", name)
                rank = _RANK.search(name)
                rank_name = rank[0] if rank else ""
                label = f"{run.name}, {rank_name}" if len(runs) > 1 else rank_name
            charts_of_title = charts[title]
            chart = charts_of_title.setdefault(chart_name, Chart(chart_name, [], marks))
            if title == _GROUPS[0][0]:
                line_look = len(chart.lines)
            chart.lines.append(Line(label, line_look, series))
    order = (5, 6, 1, 4, 3, 2, 0, 7)
    titles = [_GROUPS[each][0] for each in order]
    return {title: list(charts[title].values()) for title in titles if charts[title]}


def thinned(series: Series) -> list[tuple[float, float]]:
    """Return at most `POINTS` points of a series: of each part, the smallest and largest value.

    Values that are infinite or NaN are left out. Steps are in order, also where a run wrote some
    of them twice.
    """
    points = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if isfinite(v)]
    if any(after[0] < before[0] for before, after in pairwise(points)):
        points.sort(key=lambda point: point[0])
    if len(points) <= POINTS:
        return points
    parts = POINTS // 2 - 1
    chosen = [points[0]]
    for part in range(parts):
        some = points[part * len(points) // parts : (part + 1) * len(points) // parts]
        extremes = {min(some, key=lambda p: p[1]), max(some, key=lambda p: p[1])}
        chosen += sorted(extremes)
    return [*chosen, points[-1]]


def draw(chart: Chart) -> str:
    """Return a chart as a figure."""
    lines = [(line, thinned(line.series)) for line in chart.lines]
    odd = sum(not isfinite(value) for line in chart.lines for value in line.series.values)
    note = f" <small>{odd} value(s) not finite</small>" if odd else ""
    values = [value for _, points in lines for _, value in points]
    steps = [step for _, points in lines for step, _ in points]
    title = f"<figcaption>{escape(chart.name)}{note}</figcaption>"
    if not values:
        return f'<figure>{title}<p class="no">no finite value</p></figure>'
    is_log = min(values) > 0 and max(values) / min(values) > 1000
    y_ticks, low, high = _axis(min(values), max(values), is_log=is_log)
    x_ticks, first, last = _axis(min(steps), max(steps), tight=True)

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        value = log10(value) if is_log else value
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    drawn = []
    for tick in y_ticks:
        drawn.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" '
            f'y2="{y(tick):.1f}"/><text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" '
            f'text-anchor="end">{short(tick)}</text>'
        )
    for tick in x_ticks:
        anchor = "end" if x(tick) > _WIDTH - 30 else "middle"
        drawn.append(
            f'<text x="{min(x(tick), _WIDTH - 2.0):.1f}" y="{_HEIGHT - 8}" '
            f'text-anchor="{anchor}">{short(tick)}</text>'
        )
    for step, look in chart.marks:
        if first <= step <= last:
            drawn.append(
                f'<line class="mark" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{_TOP}" '
                f'y2="{_HEIGHT - _BOTTOM}" stroke="{color(look)}"><title>resumed at step '
                f"{short(step)}</title></line>"
            )
    for line, points in lines:
        drawn.append(_line(line, [(x(step), y(value), step, value) for step, value in points]))
    label = f"{chart.name} by step" + (", logarithmic" if is_log else "")
    picture = svg(_WIDTH, _HEIGHT, label, drawn)
    legend = _legend(chart.lines) if len(chart.lines) > 1 else ""
    return f"<figure>{title}{picture}{legend}<output>&nbsp;</output></figure>"


def _line(line: Line, points: Sequence[tuple[float, float, float, float]]) -> str:
    """Draw a line; its points are also data, which the script of the page shows on hover."""
    if not points:
        return ""
    look = f'stroke="{color(line.look)}" stroke-dasharray="{_dashes(line.look)}"'
    label = escape(line.label)
    if len(points) == 1:
        (left, top, step, value) = points[0]
        return (
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3.5" fill="{color(line.look)}"><title>'
            f"{label} {short(value)} at step {short(step)}</title></circle>"
        )
    places = " ".join(f"{left:.1f},{top:.1f}" for left, top, _, _ in points)
    data = " ".join(f"{step:g},{value:.6g}" for _, _, step, value in points)
    return (
        f'<polyline points="{places}" {look} data-name="{label}" data-points="{data}"><title>'
        f"{label}: {short(points[-1][3])} at step {short(points[-1][2])}</title></polyline>"
    )


def _legend(lines: Iterable[Line]) -> str:
    spans = (
        f'<span><svg class="dash" viewBox="0 0 24 4" aria-hidden="true"><line x1="0" x2="24" '
        f'y1="2" y2="2" stroke="{color(line.look)}" stroke-width="3" '
        f'stroke-dasharray="{_dashes(line.look)}"/></svg> {escape(line.label)}</span>'
        for line in lines
    )
    return f'<p class="key">{"".join(spans)}</p>'


def _dashes(look: int) -> str:
    """Return the dashes of a line: beyond the last color, colors repeat with other dashes."""
    return _DASHES[look // COLORS % len(_DASHES)]


def _axis(
    low: float, high: float, *, is_log: bool = False, tight: bool = False
) -> tuple[list[float], float, float]:
    """Return the ticks of an axis, and its ends (of logarithms if `is_log`)."""
    if is_log:
        first, last = floor(log10(low)), ceil(log10(high))
        every = max(1, (last - first) // 5)
        return [10.0**power for power in range(first, last + 1, every)], first, last
    if low == high:
        pad = abs(low) / 2 or 1.0
        return [low], low - pad, high + pad
    span = high - low
    step = 10.0 ** floor(log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 5)
    begin, end = floor(low / step), ceil(high / step)
    ticks = [number * step for number in range(begin, end + 1)]
    if tight:
        return [tick for tick in ticks if low <= tick <= high], low, high
    return ticks, begin * step, end * step


def short(value: float) -> str:
    """Return a number for a reader: four digits, and a unit for large ones."""
    if not isfinite(value):
        return str(value)
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"
