"""`stratagem mesh draw`: the schedule of a pipeline as a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stratagem.cli import at_least, parser_of, table_width
from stratagem.errors import ConfigurationError
from stratagem_mesh.pipeline.drawing import ScheduleDrawing
from stratagem_mesh.pipeline.schedule import SCHEDULES

SUMMARY = "Draw the schedule of a pipeline: stages by time."

_DESCRIPTION = f"""{SUMMARY}

Each line is a stage. F3 is the forward pass of micro-batch 3, and B3 its backward pass, which takes
twice the time. Dots are the bubble: the rank waits. All stages take the same time, and transfers
take none.
"""


def run(arguments: Sequence[str]) -> int:
    """Print or write the picture, and return the exit code.

    Raises:
        SystemExit: the arguments are wrong (exit code 2), or ask for help.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    virtual = options.virtual_stages or (2 if options.schedule == "interleaved" else 1)
    schedule = options.schedule or ("interleaved" if virtual > 1 else "1f1b")
    output: Path | None = options.output
    if output is not None and output.suffix != ".svg":
        parser.error(f"expected a path that ends with .svg, received --output {output}")
    try:
        drawing = ScheduleDrawing(schedule, options.pipeline, virtual, options.micro_batches)
    except ConfigurationError as error:
        parser.error(str(error))
    lines = [drawing.title, *drawing.words]
    if output is None:
        lines[1:1] = ["", drawing.text(table_width()), ""]
    else:
        try:
            output.write_text(drawing.svg(), encoding="utf-8")
        except OSError as error:
            print(f"stratagem mesh draw: error: cannot write {output}: {error}", file=sys.stderr)
            return 2
        lines.append(f"The picture is in {output}")
    print("\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("mesh draw", _DESCRIPTION, json=False)
    add = parser.add_argument
    add("--pipeline", metavar="N", type=at_least(1), required=True, help="the number of ranks")
    add(
        "--micro-batches",
        metavar="N",
        type=at_least(1),
        required=True,
        help="the number of micro-batches of a step: accumulate_grad_batches",
    )
    add(
        "--schedule",
        choices=SCHEDULES,
        help="the order of the passes; interleaved with several --virtual-stages, otherwise 1f1b",
    )
    add(
        "--virtual-stages",
        metavar="N",
        type=at_least(1),
        help="the number of stages on each rank; 2 for interleaved, otherwise 1",
    )
    add("--output", metavar="PATH", type=Path, help="write an SVG file in place of text")
    return parser
