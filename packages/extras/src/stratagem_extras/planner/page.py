"""A plan as one HTML file: bars for each strategy beside the device's memory, and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10

from stratagem_extras.planner.plan import MemoryPlan, PlannedStrategy

GIB = 2**30
PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "temporary",
)

Curves = Mapping[str, Mapping[str, MemoryPlan]]
"""Plans by what is varied ("devices"), and by its value ("8")."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --line: #767676; --bad: #b3261e;
  --c0: #2f5da8; --c1: #c2571a; --c2: #3b7d3f; --c3: #7a3f98; --c4: #a67c00;
  --c5: #8a8a8a; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --paper: #161616; --line: #9a9a9a;
  --bad: #ff8a80; --c0: #7ba7f0; --c1: #f0a066; --c2: #83c787; --c3: #c99be0; --c4: #e3c04b;
  --c5: #a5a5a5; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; min-width: 40rem; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
code, pre { font-family: ui-monospace, monospace; } pre { overflow-x: auto; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
td, th { padding: .2rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; } .no { color: var(--bad); }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; } .key b { padding: 0 .5rem; }
"""


def write_page(plan: MemoryPlan, curves: Curves) -> str:
    """Return the page, which loads nothing from elsewhere.

    Args:
        plan: whose strategies are drawn as bars.
        curves: further plans, drawn as one chart for each thing that is varied.
    """
    rows = [row for row in plan.strategies if row.memory is not None]
    call = f"<pre><code>{escape(plan.call)}</code></pre>" if plan.call else "<p>Nothing fits.</p>"
    charts = "".join(
        f"<h2>Memory of a device by {escape(what)}</h2>{_curves(plans, plan.capacity)}"
        for what, plans in curves.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Memory plan</title><style>{_STYLE}</style></head><body>
<h1>Which strategy, and will it fit?</h1>
<p>{plan.parameters:,} parameters, precision {escape(plan.precision)}, {plan.num_nodes} node(s) of
{plan.devices} device(s) of {_gib(plan.capacity)}. Bytes are those of tensors of one rank at the
maximum of a step. A plan fills at most 90% of a device.</p>
{call}<h2>Memory of a device by strategy</h2>{_key(PARTS)}{_bars(rows, plan.capacity)}
{charts}<h2>Figures</h2><div class="scroll">{_table(rows)}</div></body></html>
"""


def _bars(rows: Sequence[PlannedStrategy], capacity: int) -> str:
    """Draw a bar for each strategy; one that is far too long ends in an arrow."""
    end = min(max(row.on_device for row in rows), 2.5 * capacity)
    end = max(end, 1.1 * capacity)
    left, width, step = 210, 560, 26
    height = step * len(rows) + 30
    drawn = []
    for number, row in enumerate(rows):
        top, x = number * step + 22, float(left)
        name = escape(row.name)
        drawn.append(f'<text x="{left - 8}" y="{top + 14}" text-anchor="end">{name}</text>')
        for part, size in zip(PARTS, _sizes(row), strict=True):
            wide = min(size / end * width, left + width - x)
            drawn.append(
                f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="18" '
                f'fill="var(--c{PARTS.index(part)})"><title>{part} {_gib(size)}</title></rect>'
            )
            x += wide
        more = " \u2192" if row.on_device > end else ""
        host = f" + {_gib(row.on_host)} in the host" if row.on_host else ""
        host += f" + {_gib(row.on_disk)} on disk" if row.on_disk else ""
        drawn.append(
            f'<text x="{x + 6:.1f}" y="{top + 14}">{_gib(row.on_device)}{more}{host}</text>'
        )
    line = left + capacity / end * width
    drawn.append(
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="16" y2="{height}" stroke="var(--bad)" '
        f'stroke-dasharray="4 3"/><text x="{line:.1f}" y="12" text-anchor="middle">the device has '
        f"{_gib(capacity)}</text>"
    )
    return _svg(1000, height, "Memory of a device by strategy", drawn)


def _curves(plans: Mapping[str, MemoryPlan], capacity: int) -> str:
    """Draw a line for each strategy over what is varied; the axis of bytes is logarithmic."""
    lines: dict[str, list[tuple[int, int]]] = {}
    for position, plan in enumerate(plans.values()):
        for row in plan.strategies:
            if row.memory is not None:
                lines.setdefault(row.name, []).append((position, row.on_device))
    sizes = [size for line in lines.values() for _, size in line if size] + [capacity]
    low, high = log10(min(sizes)) - 0.1, log10(max(sizes)) + 0.1
    left, width, height = 90, 640, 260

    def x(position: int) -> float:
        return left + width * position / max(1, len(plans) - 1)

    def y(size: int) -> float:
        return height - (log10(max(size, 1)) - low) / (high - low) * (height - 20)

    drawn = [
        f'<line x1="{left}" x2="{left + width}" y1="{y(capacity):.1f}" y2="{y(capacity):.1f}" '
        f'stroke="var(--bad)" stroke-dasharray="4 3"/><text x="{left - 8}" '
        f'y="{y(capacity) + 4:.1f}" text-anchor="end">{_gib(capacity)}</text>'
    ]
    for size in (min(sizes), max(sizes)):
        if abs(y(size) - y(capacity)) > 16:
            drawn.append(
                f'<text x="{left - 8}" y="{y(size) + 4:.1f}" text-anchor="end">{_gib(size)}</text>'
            )
    for position, value in enumerate(plans):
        drawn.append(
            f'<text x="{x(position):.1f}" y="{height + 18}" text-anchor="middle">'
            f"{escape(value)}</text>"
        )
    for number, (name, line) in enumerate(lines.items()):
        points = " ".join(f"{x(position):.1f},{y(size):.1f}" for position, size in line)
        color = f"var(--c{number % 6})"
        dots = "".join(
            f'<circle cx="{x(position):.1f}" cy="{y(size):.1f}" r="3.5" fill="{color}">'
            f"<title>{escape(name)}: {_gib(size)}</title></circle>"
            for position, size in line
        )
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>{dots}')
    return _key(tuple(lines)) + _svg(800, height + 30, "Memory of a device", drawn)


def _table(rows: Sequence[PlannedStrategy]) -> str:
    heads = "".join(
        f"<th>{head}</th>" for head in ("strategy", "fits", "device", *PARTS, "host", "disk")
    )
    lines = []
    for row in rows:
        fits = "<td>yes</td>" if row.fits else '<td class="no">no</td>'
        cells = [_gib(size) for size in (row.on_device, *_sizes(row), row.on_host, row.on_disk)]
        values = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr><td>{escape(row.name)}</td>{fits}{values}</tr>")
    return f"<table><tr>{heads}</tr>{''.join(lines)}</table>"


def _sizes(row: PlannedStrategy) -> tuple[int, ...]:
    """Return the bytes on the device, by `PARTS`."""
    memory = row.device
    assert memory is not None
    rest = memory.temporary + memory.buffers
    state = (memory.parameters, memory.gradients, memory.optimizer)
    return (*state, memory.activations, memory.communication, rest)


def _key(names: Sequence[str]) -> str:
    spans = (
        f'<span><b style="background: var(--c{number % 6})"></b> {escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return f'<p class="key">{"".join(spans)}</p>'


def _svg(width: int, height: int, label: str, drawn: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    return f'<div class="scroll">{head}{"".join(drawn)}</svg></div>'


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
