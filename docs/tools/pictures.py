"""Draws the pictures of the pages as SVG, each for a light and for a dark page.

    python docs/tools/pictures.py [--check]

Numbers come from the tables of BENCHMARKS.md. With --check nothing is written, and the exit code is
1 if a committed picture is not what this script draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from stratagem_mesh.pipeline.drawing import ScheduleDrawing

DOCS = Path(__file__).resolve().parents[1]
FOLDER = DOCS / "_static" / "pictures"
BENCHMARKS = DOCS.parent / "BENCHMARKS.md"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Colours:
    """The colours of a page. Texts have a contrast of at least 4.5 on `ground` and on `box`."""

    ground: str
    text: str
    muted: str
    box: str
    line: str
    ours: str
    theirs: str
    bad: str


LIGHT = Colours(
    ground="#ffffff",
    text="#1b1f24",
    muted="#57606a",
    box="#eef2f7",
    line="#8c959f",
    ours="#0b5cad",
    theirs="#8a6d3b",
    bad="#b3261e",
)
DARK = Colours(
    ground="#131416",
    text="#e6e8eb",
    muted="#a9b1ba",
    box="#232a33",
    line="#6b7683",
    ours="#6cb2ff",
    theirs="#d9b26f",
    bad="#ff8a80",
)


@dataclass
class Drawing:
    """An SVG in the making."""

    width: int
    height: int
    colours: Colours
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 14,
        colour: str = "",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Add a line of text; (x, y) is where its baseline begins, or its middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour or self.colours.text}" '
            f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "", line: str = ""
    ) -> None:
        """Add a rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" '
            f'fill="{fill or self.colours.box}" stroke="{line or self.colours.line}"/>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = "") -> None:
        """Add an arrow."""
        colour = colour or self.colours.line
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" '
            'stroke-width="1.5" marker-end="url(#end)"/>'
        )

    def svg(self, title: str) -> str:
        """Return the file."""
        head = (
            '<defs><marker id="end" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0 0 L10 5 L0 10 z" fill="{self.colours.line}"/></marker></defs>'
            f'<rect width="100%" height="100%" fill="{self.colours.ground}"/>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{FONT}" role="img">\n'
            f"<title>{escape(title)}</title>\n{head}\n" + "\n".join(self.parts) + "\n</svg>\n"
        )


def table_below(heading: str, label: str = "") -> list[list[str]]:
    """Return the rows of the first table of BENCHMARKS.md below a heading, without its head."""
    text = BENCHMARKS.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert text, f"BENCHMARKS.md has no section {heading!r}"
    rows = []
    for line in text.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def bars(drawing: Drawing, rows: list[tuple[str, float, bool]], unit: str) -> None:
    """Draw a bar for each (name, value, is ours); values may be negative."""
    left, right = 190, drawing.width - 110
    lowest, highest = min(0.0, *(v for _, v, _ in rows)), max(v for _, v, _ in rows)
    scale = (right - left) / (highest - lowest)
    zero = left - lowest * scale
    for number, (name, value, ours) in enumerate(rows):
        y = 14 + number * 34
        colour = drawing.colours.ours if ours else drawing.colours.theirs
        start, end = sorted((zero, zero + value * scale))
        drawing.box(start, y, max(end - start, 1), 22, colour, colour)
        drawing.text(left - 34, y + 16, name, anchor="end")
        drawing.text(max(end, zero) + 8, y + 16, f"{value:g} {unit}", colour=drawing.colours.text)
    drawing.parts.append(
        f'<line x1="{zero:g}" y1="6" x2="{zero:g}" y2="{drawing.height - 6}" '
        f'stroke="{drawing.colours.line}"/>'
    )


def peers(colours: Colours) -> str:
    """The cost of a step beside other libraries."""
    values = {
        name: float(value)
        for name, value, _ in table_below(
            "How much does a training step cost, beside other libraries?"
        )
    }
    names = {
        "Lite": "Lite",
        "Trainer": "Trainer",
        "Fabric": "Fabric",
        "Accelerate": "Accelerate",
        "Lightning Trainer": "Lightning's Trainer",
    }
    drawing = Drawing(720, 184, colours)
    bars(drawing, [(names[n], values[n], n in ("Lite", "Trainer")) for n in names], "us")
    return drawing.svg("Time of a step above a raw PyTorch loop, in microseconds")


def memory(colours: Colours) -> str:
    """The peak of a rank by strategy."""
    rows = [
        (name, float(peak), name != "ddp")
        for name, peak, *_ in table_below("How much memory does a rank need?")
    ]
    drawing = Drawing(720, 150, colours)
    bars(drawing, sorted(rows, key=lambda row: -row[1]), "MB")
    return drawing.svg("Peak memory of a rank by strategy, in megabytes")


def layers(colours: Colours) -> str:
    """The layers, from the front ends to the plugins."""
    drawing = Drawing(720, 330, colours)
    rows = (
        ("Front ends", ("Trainer", "Lite"), "run the loop, or let you run it"),
        ("Plan", ("resolve()", "specs"), "arguments to components, with reasons"),
        (
            "Interfaces",
            ("Strategy", "Accelerator", "Precision", "Launcher", "CheckpointIO"),
            "what a component does",
        ),
        ("Plugins", ("core's own", "cuda", "deepspeed", "xla", "yours"), "found by entry points"),
    )
    for number, (name, inside, about) in enumerate(rows):
        y = 10 + number * 80
        drawing.box(10, y, 700, 62)
        drawing.text(24, y + 26, name, bold=True, size=15)
        drawing.text(24, y + 47, about, size=12, colour=colours.muted)
        width = 92
        for place, text in enumerate(inside):
            x = 700 - (len(inside) - place) * (width + 4)
            colour = colours.ours if text == "yours" else colours.line
            drawing.box(x, y + 14, width, 34, colours.ground, colour)
            drawing.text(x + width / 2, y + 36, text, size=12, anchor="middle")
        if number:
            drawing.arrow(360, y - 18, 360, y - 1)
    return drawing.svg("The layers of Stratagem: each uses those below it")


def step(colours: Colours) -> str:
    """The way of a step: who calls whom."""
    drawing = Drawing(800, 400, colours)
    lanes = ("your Module", "Trainer", "Strategy", "other ranks")
    places = [90 + number * 206 for number in range(4)]
    for x, name in zip(places, lanes, strict=True):
        drawing.box(x - 70, 10, 140, 32)
        drawing.text(x, 31, name, anchor="middle", bold=True)
        drawing.parts.append(
            f'<line x1="{x}" y1="42" x2="{x}" y2="392" stroke="{colours.line}" '
            'stroke-dasharray="3 4"/>'
        )
    calls = (
        (1, 2, "train_step(batches)"),
        (2, 1, "1. begin: move the batch"),
        (1, 0, "2. training_step"),
        (0, 2, "loss"),
        (2, 3, "3. backward: average gradients"),
        (2, 2, "4. next batch: 1 to 3 again"),
        (2, 3, "5. clip by the norm of all ranks"),
        (2, 1, "6. optimizer step, schedulers"),
        (1, 0, "7. end: on_train_batch_end"),
    )
    for number, (source, target, words) in enumerate(calls):
        y = 78 + number * 37
        x, to_x = places[source], places[target]
        if source == target:
            drawing.text(x + 8, y, words, size=12, colour=colours.muted)
            continue
        drawing.arrow(x, y, to_x, y, colours.ours)
        middle = (x + to_x) / 2
        width = len(words) * 6.3 + 8
        drawing.parts.append(
            f'<rect x="{middle - width / 2:g}" y="{y - 21}" width="{width:g}" height="17" '
            f'fill="{colours.ground}"/>'
        )
        drawing.text(middle, y - 8, words, size=12, anchor="middle")
    return drawing.svg("The calls of one optimizer step, in their order")


def hang(colours: Colours) -> str:
    """A hang from the first wrong call to the error."""
    drawing = Drawing(720, 210, colours)
    left, seconds = 80, 44.0
    for number in range(2):
        y = 40 + number * 60
        drawing.text(10, y + 21, f"rank {number}", bold=True)
        drawing.box(left, y, 3 * seconds, 32, colours.box, colours.ours)
        drawing.text(left + 1.5 * seconds, y + 21, "trains", size=12, anchor="middle")
        waits = ("waits in all_gather", "waits in backward")[number]
        drawing.box(left + 3 * seconds, y, 10 * seconds, 32, colours.ground, colours.bad)
        drawing.text(left + 8 * seconds, y + 21, waits, size=12, anchor="middle")
    for second, words in ((3, "step 9"), (13, "timeout=10 is over")):
        x = left + second * seconds
        drawing.parts.append(
            f'<line x1="{x:g}" y1="30" x2="{x:g}" y2="146" stroke="{colours.bad}" '
            'stroke-dasharray="4 3"/>'
        )
        drawing.text(x, 22, words, size=12, anchor="middle", colour=colours.bad)
    drawing.text(
        left,
        172,
        "Rank 0 asks each rank where it is. One error names the operation, the file and",
        size=13,
    )
    drawing.text(left, 192, "line, and the step of both, and all processes end.", size=13)
    return drawing.svg("Timeline of a hang: two ranks wait in different collectives")


def pipeline(colours: Colours) -> str:
    """A step of 1F1B."""
    return ScheduleDrawing("1f1b", 4, 1, 8).svg(dark=colours is DARK)


def interleaved(colours: Colours) -> str:
    """A step of interleaved 1F1B."""
    return ScheduleDrawing("interleaved", 4, 2, 8).svg(dark=colours is DARK)


PICTURES: dict[str, Callable[[Colours], str]] = {
    "layers": layers,
    "step": step,
    "memory": memory,
    "peers": peers,
    "hang": hang,
    "pipeline": pipeline,
    "interleaved": interleaved,
}


def main(arguments: list[str]) -> int:
    """Draw all pictures, or compare them; return the exit code."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    differing = []
    for name, draw in PICTURES.items():
        for kind, colours in (("light", LIGHT), ("dark", DARK)):
            path, text = FOLDER / f"{name}-{kind}.svg", draw(colours)
            if not path.exists() or path.read_text() != text:
                differing.append(path.name)
                if "--check" not in arguments:
                    path.write_text(text)
    if "--check" in arguments and differing:
        print(f"not as docs/tools/pictures.py draws them: {', '.join(differing)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
