"""A plan as one HTML file: bars for each strategy beside the device's memory, and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10

from stratagem.errors import format_size, format_text
from stratagem_extras.page import color, key, svg, table, whole_page
from stratagem_extras.planner.plan import MemoryPlan, PlannedStrategy

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

_STYLE = """svg { min-width: 52rem; }
svg text { paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }"""


def write_page(plan: MemoryPlan, curves: Curves) -> str:
    """Return the page, without external resources.

    Args:
        plan: the plan; its strategies are drawn as bars.
        curves: further plans, drawn as a chart for each varied quantity.
    """
    rows = [row for row in plan.strategies if row.memory is not None]
    call = f"<pre><code>{escape(plan.call)}</code></pre>" if plan.call else "<p>Nothing fits.</p>"
    charts = "".join(
        f"<h2>Memory of a device by {escape(what)}</h2>{_curves(plans, plan.capacity)}"
        for what, plans in curves.items()
    )
    body = f"""<h1>Which strategy, and will it fit?</h1>
<p>{plan.parameters:,} parameters, precision {escape(plan.precision)}, {plan.num_nodes} node(s) of
{plan.devices} device(s) of {format_size(plan.capacity)}. Bytes are those of tensors of one rank
at the maximum of a step. A plan fills at most 90% of a device.</p>
{call}<h2>Memory of a device by strategy</h2>{key(PARTS)}{_bars(rows, plan.capacity)}
{charts}<h2>Figures</h2>{_table(rows)}"""
    return whole_page("Memory plan", body, _STYLE)


def _bars(rows: Sequence[PlannedStrategy], capacity: int) -> str:
    """Draw a bar for each strategy; one that is far too long ends in an arrow."""
    end = min(max(row.on_device for row in rows), 2.5 * capacity)
    end = max(end, 1.1 * capacity)
    longest = max(len(row.name) for row in rows)
    left = min(max(240, 7 * longest + 16), 480)
    width, step = 600 - left, 26
    height = step * len(rows) + 30
    bars, texts = [], []
    for number, row in enumerate(rows):
        top, x = number * step + 22, float(left)
        name = escape(format_text(row.name, 64))
        texts.append(f'<text x="{left - 8}" y="{top + 14}" text-anchor="end">{name}</text>')
        for part, size in zip(PARTS, _sizes(row), strict=True):
            wide = min(size / end * width, left + width - x)
            bars.append(
                f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="18" '
                f'fill="{color(PARTS.index(part))}">'
                f"<title>{part} {format_size(size)}</title></rect>"
            )
            x += wide
        more = " \u2192" if row.on_device > end else ""
        host = f" + {format_size(row.on_host)} in the host" if row.on_host else ""
        host += f" + {format_size(row.on_disk)} on disk" if row.on_disk else ""
        texts.append(
            f'<text x="{x + 6:.1f}" y="{top + 14}">{format_size(row.on_device)}{more}{host}</text>'
        )
    line = left + capacity / end * width
    bars.append(
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="16" y2="{height}" stroke="var(--bad)" '
        f'stroke-dasharray="4 3"/><text x="{line:.1f}" y="12" text-anchor="middle">the device has '
        f"{format_size(capacity)}</text>"
    )
    # Over bars and the line, where these reach.
    return _svg(1000, height, "Memory of a device by strategy", [*bars, *texts])


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
        f'y="{y(capacity) + 4:.1f}" text-anchor="end">{format_size(capacity)}</text>'
    ]
    for size in (min(sizes), max(sizes)):
        if abs(y(size) - y(capacity)) > 16:
            drawn.append(
                f'<text x="{left - 8}" y="{y(size) + 4:.1f}" text-anchor="end">'
                f"{format_size(size)}</text>"
            )
    for position, value in enumerate(plans):
        drawn.append(
            f'<text x="{x(position):.1f}" y="{height + 18}" text-anchor="middle">'
            f"{escape(value)}</text>"
        )
    for number, (name, line) in enumerate(lines.items()):
        points = " ".join(f"{x(position):.1f},{y(size):.1f}" for position, size in line)
        ink = color(number)
        dots = "".join(
            f'<circle cx="{x(position):.1f}" cy="{y(size):.1f}" r="3.5" fill="{ink}">'
            f"<title>{escape(name)}: {format_size(size)}</title></circle>"
            for position, size in line
        )
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{ink}"/>{dots}')
    return key(tuple(lines)) + _svg(800, height + 30, "Memory of a device", drawn)


def _table(rows: Sequence[PlannedStrategy]) -> str:
    lines = []
    for row in rows:
        fits = "yes" if row.fits else '<span class="no">no</span>'
        cells = [
            format_size(size) for size in (row.on_device, *_sizes(row), row.on_host, row.on_disk)
        ]
        lines.append([escape(row.name), fits, *cells])
    return table(("strategy", "fits", "device", *PARTS, "host", "disk"), lines)


def _sizes(row: PlannedStrategy) -> tuple[int, ...]:
    """Return the bytes on the device, by `PARTS`."""
    memory = row.device
    assert memory is not None
    rest = memory.temporary + memory.buffers
    state = (memory.parameters, memory.gradients, memory.optimizer)
    return (*state, memory.activations, memory.communication, rest)


def _svg(width: int, height: int, label: str, drawn: Sequence[str]) -> str:
    return f'<div class="scroll">{svg(width, height, label, drawn)}</div>'
