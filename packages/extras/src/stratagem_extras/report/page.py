"""A report on runs as one HTML file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from math import isfinite

from stratagem_extras.callbacks.time_ledger import KINDS
from stratagem_extras.page import color, table, whole_page
from stratagem_extras.report.charts import draw, grouped, short
from stratagem_extras.report.logs import Run

_MOST_CHARTS = 40
"""The most charts of a group; its further metrics are in the table of values."""

_STYLE = """
body { max-width: 84rem; }
main, .charts { display: grid; gap: 0 1.5rem; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 60rem) { main { grid-template-columns: repeat(3, minmax(0, 1fr)); }
  main > .whole { grid-column: 1 / -1; } .two { grid-column: span 2; }
  .two .charts { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .whole .charts { grid-template-columns: repeat(3, minmax(0, 1fr)); } }
section { min-width: 0; }
figure { margin: 0; min-width: 0; max-width: 36rem; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
figcaption small { font-weight: 400; } figure .key { margin: 0; font-size: 13px; }
polyline { fill: none; stroke-width: 1.7; stroke-linejoin: round; }
.grid { stroke: var(--line); stroke-width: .4; } .mark { stroke-dasharray: 2 4; }
.dash { width: 24px; height: 4px; vertical-align: middle; }
output { display: block; font-size: 13px; min-height: 1.5em; overflow-wrap: anywhere; }
td { vertical-align: top; }
.cut { max-width: 24rem; overflow: hidden; text-overflow: ellipsis; }
.cut { display: inline-block; vertical-align: bottom; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; } a { color: var(--c0); }
"""

# Without it the page shows the same charts; each line's title then has its last value.
_SCRIPT = """<script>
for (const figure of document.querySelectorAll("figure")) {
  const picture = figure.querySelector("svg:not(.dash)"), shown = figure.querySelector("output");
  if (!picture || !shown) continue;
  const lines = [...picture.querySelectorAll("polyline")].map(line => ({
    name: line.dataset.name,
    at: line.getAttribute("points").split(" ").map(point => parseFloat(point)),
    data: line.dataset.points.split(" ").map(point => point.split(",")) }));
  picture.addEventListener("pointermove", event => {
    const box = picture.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * picture.viewBox.baseVal.width;
    shown.textContent = lines.map(line => {
      let best = 0;
      line.at.forEach((place, i) => {
        if (Math.abs(place - x) < Math.abs(line.at[best] - x)) best = i; });
      return `${line.name}: ${Number(line.data[best][1])} at step ${line.data[best][0]}`;
    }).join("; "); });
  picture.addEventListener("pointerleave", () => { shown.textContent = "\\u00a0"; });
}
</script>"""


def write_page(runs: Sequence[Run]) -> str:
    """Return the page, without external resources.

    Every name and text of the logs is escaped.

    Args:
        runs: the runs, side by side in each chart and table.
    """
    charts = grouped(runs)
    sections = [("Runs", "whole", _runs(runs))]
    for title, some in charts.items():
        more = f"<p>{len(some) - _MOST_CHARTS} more are in the table of values.</p>"
        drawn = "".join(map(draw, some[:_MOST_CHARTS]))
        body = f'<div class="charts">{drawn}</div>{more if len(some) > _MOST_CHARTS else ""}'
        # Up to three charts stand side by side, also in small groups.
        sections.append((title, {1: "one", 2: "two"}.get(len(some), "whole"), body))
    if any("goodput" in run.series for run in runs):
        sections.append(("Where the time went", "whole", _times(runs)))
    if any(run.hyperparameters for run in runs):
        sections.append(("Hyperparameters", "whole", _hyperparameters(runs)))
    if any(run.series for run in runs):
        sections.append(("Values", "whole", _values(runs)))
    if any(run.checkpoints for run in runs):
        sections.append(("Checkpoints", "whole", _checkpoints(runs)))
    links = "".join(
        f'<a href="#s{number}">{title}</a>' for number, (title, _, _) in enumerate(sections)
    )
    bodies = "".join(
        f'<section class="{width}"><h2 id="s{number}">{title}</h2>{body}</section>'
        for number, (title, width, body) in enumerate(sections)
    )
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return whole_page(
        f"Report: {name}",
        f"<h1>{escape(name)}</h1><nav>{links}</nav><main>{bodies}</main>{_SCRIPT}",
        _STYLE,
    )


def _runs(runs: Sequence[Run]) -> str:
    rows = []
    for number, run in enumerate(runs):
        step = run.last_step()
        epochs = run.series.get("epoch")
        resumed = ", ".join(map(short, run.resumed)) or "-"
        rows.append(
            [
                f'<b style="color: {color(number)}">&#9632;</b> {_cut(run.name)}',
                escape(run.status) or "not known",
                "-" if step is None else f"{step:,.0f}",
                short(max(epochs.values)) if epochs else "-",
                resumed,
                str(len(run.checkpoints)),
                _cut(str(run.folder)),
            ]
        )
    heads = ("run", "ended", "last step", "last epoch", "resumed at step", "checkpoints", "folder")
    notes = "".join(
        f"<li>{escape(run.name)}: {escape(note)}</li>" for run in runs for note in run.notes
    )
    return table(heads, rows) + (f"<ul>{notes}</ul>" if notes else "")


def _times(runs: Sequence[Run]) -> str:
    """Return the table of the seconds that each run has spent, by activity."""
    rows = [["goodput", *(f"<b>{_last(run, 'goodput', 1.0, '{:.1%}')}</b>" for run in runs)]]
    for kind, text in KINDS.items():
        cells = []
        for run in runs:
            values = [run.series[name].values[-1] for name in _kinds(run)]
            whole = sum(values) or 1.0
            cell = _last(run, f"goodput/{kind}", 1.0, "{:,.1f} s")
            cells.append(f"{cell} ({_last(run, f'goodput/{kind}', whole, '{:.1%}')})")
        rows.append([escape(text), *cells])
    rows.append(["restarts", *(_last(run, "goodput/restarts", 1.0, "{:.0f}") for run in runs)])
    return table(("time", *(run.name for run in runs)), rows)


def _kinds(run: Run) -> list[str]:
    return [name for kind in KINDS if (name := f"goodput/{kind}") in run.series]


def _last(run: Run, name: str, divisor: float, form: str) -> str:
    """Return the last value of a metric as text; "-" without one."""
    return form.format(run.series[name].values[-1] / divisor) if name in run.series else "-"


def _hyperparameters(runs: Sequence[Run]) -> str:
    """Return the table of hyperparameters, those first that differ between the runs."""
    names = dict.fromkeys(name for run in runs for name in run.hyperparameters)
    values = {name: [run.hyperparameters.get(name) for run in runs] for name in names}
    differing = {name for name, of_runs in values.items() if len(set(of_runs)) > 1}
    rows = []
    for name in sorted(names, key=lambda name: name not in differing):
        bold = "b" if name in differing else "span"
        cells = ["-" if one is None else f"<{bold}>{_cut(one)}</{bold}>" for one in values[name]]
        rows.append([f"<{bold}>{escape(name)}</{bold}>", *cells])
    return table(("name", *(run.name for run in runs)), rows)


def _values(runs: Sequence[Run]) -> str:
    """Return the table of each metric's last value, with its smallest and largest."""
    names = dict.fromkeys(name for run in runs for name in run.series if name != "epoch")
    rows = []
    for name in names:
        cells = []
        for run in runs:
            series = run.series.get(name)
            if series is None:
                cells.append("-")
                continue
            finite = [value for value in series.values if isfinite(value)]
            cell = short(series.values[-1])
            if finite:
                cell += f" <small>({short(min(finite))} to {short(max(finite))})</small>"
            cells.append(cell)
        rows.append([_cut(name), *cells])
    return table(("last value (smallest to largest)", *(run.name for run in runs)), rows)


def _checkpoints(runs: Sequence[Run]) -> str:
    rows = [
        [
            _cut(run.name),
            _cut(each.name),
            f"{each.size / 2**20:,.1f} MiB",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.saved)),
        ]
        for run in runs
        for each in run.checkpoints
    ]
    return table(("run", "checkpoint", "size", "saved"), rows)


def _cut(text: str) -> str:
    """Return a text of any length for a cell; its whole is in the title."""
    return f'<span class="cut" title="{escape(text)}">{escape(text)}</span>'
