"""Parts of the HTML pages that commands write: one file, which loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

COLORS = 6
"""The number of colors of lines and bars, `var(--c0)` and so on; then they repeat."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --line: #767676; --bad: #b3261e;
  --c0: #2f5da8; --c1: #c2571a; --c2: #3b7d3f; --c3: #6e6e6e; --c4: #7a3f98; --c5: #0b7a82; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --paper: #161616; --line: #9a9a9a;
  --bad: #ff8a80; --c0: #7ba7f0; --c1: #f0a066; --c2: #83c787; --c3: #b5b5b5; --c4: #c99be0;
  --c5: #5fc9d1; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
code, pre { font-family: ui-monospace, monospace; } pre { overflow-x: auto; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
td, th { padding: .2rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; } .no { color: var(--bad); }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; } .key b { padding: 0 .5rem; }
"""


def whole_page(title: str, body: str, style: str = "") -> str:
    """Return a page.

    Args:
        title: the title, as plain text.
        body: the HTML of its body.
        style: CSS in addition to the common style of all pages.
    """
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}{style}</style></head><body>
{body}</body></html>
"""


def color(number: int) -> str:
    """Return the color of a line or a bar."""
    return f"var(--c{number % COLORS})"


def key(names: Sequence[str]) -> str:
    """Return a legend: the names beside their colors."""
    spans = (
        f'<span><b style="background: {color(number)}"></b> {escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return f'<p class="key">{"".join(spans)}</p>'


def svg(width: int, height: int, label: str, drawn: Sequence[str], *, attributes: str = "") -> str:
    """Return a drawing.

    Args:
        width, height: its size, in the units of `drawn`.
        label: the text that a screen reader reads.
        drawn: its elements.
        attributes: further attributes of the element, with a space before.
    """
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}"{attributes}>'
        f"{''.join(drawn)}</svg>"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that scrolls on a narrow screen.

    Args:
        heads: the header of each column, as plain text.
        rows: the cells of each row, as HTML.
    """
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    # Scrollable by keyboard too, hence the tabindex.
    return f'<div class="scroll" tabindex="0"><table><tr>{head}</tr>{lines}</table></div>'
