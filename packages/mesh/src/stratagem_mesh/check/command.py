"""`stratagem mesh check`: whether a model computes the same on a mesh as in one process."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

from stratagem.cli import at_least, parser_of, print_table
from stratagem.discovery import load_target
from stratagem.errors import StratagemError
from stratagem.strategies import use_huge_pages
from stratagem_mesh.check.refusals import imported

SUMMARY = "Compare a step of a model on a mesh with one process."

_DESCRIPTION = f"""{SUMMARY}

Processes on the CPU take one step in float64, without dropout: forward, backward, clipping, an
optimizer step, an evaluation and a checkpoint, which one process reads back. The same step runs in
one process. Use a small model with the layers of the real one, or --layers 2: the model then keeps
two layers of each kind, whose values are drawn anew. The exit code is 1 if more than rounding
differs, and 2 if the mesh refuses the model or a function raises an error.
"""

_AXES = "pipeline", "replicate", "shard", "context", "tensor"
_NAMES = "context_modules", "expert_modules", "pipeline_cuts"
_OPTIONS = "sequence_parallel", "loss_parallel", "expert", *_NAMES


def run(arguments: Sequence[str]) -> int:
    """Compare, print a table, and return the exit code.

    Raises:
        SystemExit: the arguments are wrong (exit code 2), or ask for help.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if all(getattr(options, axis) == 1 for axis in _AXES):
        parser.error("expected the size of an axis above 1, such as --tensor 2 --context 2")
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does
    try:
        return _compare(options)
    except StratagemError as error:
        if os.environ.get("STRATAGEM_FULL_TRACEBACKS") == "1":
            raise
        print(f"stratagem mesh check: error: {error}", file=sys.stderr)
        return 2


def _compare(options: argparse.Namespace) -> int:
    sizes = {axis: getattr(options, axis) for axis in _AXES}
    use_huge_pages()
    # By name: the program does without torch, and this command cannot.
    comparison = "stratagem_mesh.check.comparison"
    subject_of = load_target(f"{comparison}:Subject", what="the comparison")
    compare = load_target(f"{comparison}:compare", what="the comparison")
    loss = options.loss or f"{comparison}:default_loss"
    further: dict[str, Any] = {name: getattr(options, name) for name in _OPTIONS}
    if options.schedule:
        further |= {"schedule": options.schedule, "virtual_stages": options.virtual_stages}
    if options.plan:
        further["tensor_plan"] = imported(options.plan, "--plan")
    subject = subject_of(
        imported(options.model, "the model"),
        imported(options.batch, "--batch"),
        imported(loss, "--loss"),
        {**sizes, **further},
        options.layers,
    )
    rows = compare(subject, prod(sizes.values()))
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    if options.expert > 1:
        mesh += f" with expert {options.expert}"
    print(f"{options.model} on {mesh}, float64 on the CPU\n")
    print_table(("compared", "largest difference", "in"), [_cells(row) for row in rows])
    wrong = [row for row in rows if not row.is_equal]
    for row in wrong:
        print(_told(row), file=sys.stderr)
    print("\nNot the numbers of one process." if wrong else "\nThe numbers of one process.")
    return int(bool(wrong))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("mesh check", _DESCRIPTION, json=False)
    add = parser.add_argument
    add("model", metavar="MODULE:NAME", help="a class or a function that returns the model")
    add(
        "--batch",
        metavar="MODULE:NAME",
        required=True,
        help="a function that returns a batch; with a parameter, that of a data rank's index",
    )
    add(
        "--loss",
        metavar="MODULE:NAME",
        help="a function (model, batch) that returns the loss; training_step, or the model's own",
    )
    add("--plan", metavar="MODULE:NAME", help="the tensor_plan; that of the model otherwise")
    for axis in _AXES:
        add(f"--{axis}", metavar="N", type=at_least(1), default=1, help="the size of the axis; 1")
    add(
        "--expert",
        metavar="N",
        type=at_least(1),
        default=1,
        help="the ranks of shard x context that divide experts; 1",
    )
    add(
        "--layers",
        metavar="N",
        type=at_least(1),
        help="keep the first N layers of each kind of a stack; the values of all parameters are "
        "drawn anew, so that a large model is built without memory for them",
    )
    add("--schedule", metavar="NAME", help="the schedule of the pipeline: 1f1b, gpipe, interleaved")
    add(
        "--virtual-stages",
        metavar="N",
        type=at_least(1),
        default=1,
        help="the stages on each rank of an interleaved pipeline; 1",
    )
    add("--sequence-parallel", action="store_true", help="as for MeshStrategy")
    add("--loss-parallel", action="store_true", help="as for MeshStrategy")
    meant = "whose sequence is divided", "of experts", "that begins a stage"
    for option, what in zip(_NAMES, meant, strict=True):
        add(
            f"--{option.replace('_', '-')}",
            metavar="NAME",
            action="append",
            help=f"the name of a module {what}; may be given several times",
        )
    return parser


def _cells(row: Any) -> tuple[str, str, str]:
    return row.what, f"{row.difference:.1e}", row.where if row.difference else ""


def _told(row: Any) -> str:
    more = f", and {len(row.others)} more" if row.others else ""
    place = f" in {row.where}{more}" if row.where else ""
    return f"{row.what}: differs by {row.difference:.1e}{place}"
