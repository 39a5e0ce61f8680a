"""`stratagem checkpoint durability`: whether checkpoints survive on a file system."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratagem.cli import at_least, parser_of, print_table
from stratagem.discovery import load_target

SUMMARY = "Break saves in every way, and see whether a whole checkpoint is left each time."

_DESCRIPTION = f"""{SUMMARY}

Writers are killed at random moments, also where the disk is slow and where two ranks write; the
disk is full, fails to sync, or is read-only. After each, the path must hold the checkpoint that
was durable last, or one that was begun after it, and nothing else may be left in the directory.
The exit code is 1 if that was not so once.
"""


def run(arguments: Sequence[str]) -> int:
    """Break saves and print the results; return the exit code.

    Raises:
        SystemExit: the arguments are wrong (exit code 2), or ask for help.
    """
    options = _parser().parse_args(arguments)
    directory, seed = options.directory, options.seed
    if not directory.is_dir():
        print(
            f"{str(directory)!r} is not a directory: expected one that is there, on the file "
            "system in question; make it first",
            file=sys.stderr,
        )
        return 2
    # By name: the program does without torch, and this command cannot.
    known = load_target("stratagem_testing.durability.harness:formats", what="the harness")()
    names = options.formats or list(known)
    if unknown := sorted(set(names) - set(known)):
        print(
            f"--format {unknown[0]!r}: there is no such checkpoint format; there are "
            f"{', '.join(known)}",
            file=sys.stderr,
        )
        return 2
    seed = random.randrange(10**6) if seed is None else seed
    harness = load_target("stratagem_testing.durability.harness:run", what="the harness")
    try:
        outcome = harness(
            directory,
            names=names,
            ways=(False, True) if options.asynchronous is None else (options.asynchronous,),
            kills=options.kills,
            megabytes=options.size,
            seed=seed,
        )
    except KeyboardInterrupt:
        return 130
    _print_outcome(outcome)
    print(
        f"seed {seed}; checkpoints of {options.size:g} MB in {directory}; TMPDIR "
        f"{outcome.temporary}, on {'another' if outcome.is_elsewhere else 'the same'} file system"
    )
    wrong = [(row, what) for row in outcome.rows for what in row.wrong]
    for row, what in wrong:
        print(f"{row.subject.format}, {row.scenario}: {what}", file=sys.stderr)
    if wrong:
        print(f"\nWhat the processes printed:\n{outcome.log}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("checkpoint durability", _DESCRIPTION, json=False)
    add = parser.add_argument
    add("directory", type=Path, help="where to save; on the file system in question")
    add("--kills", metavar="N", type=at_least(1), default=20, help="of writers while they save; 20")
    add(
        "--format",
        metavar="NAME",
        action="append",
        dest="formats",
        help="a format's name; may be given several times; all otherwise",
    )
    add(
        "--async",
        action=argparse.BooleanOptionalAction,
        dest="asynchronous",
        help="save in the background, or not; both otherwise",
    )
    add("--size", metavar="MB", type=at_least(0.1), default=16.0, help="of a checkpoint; 16")
    add("--seed", type=int, help="of the random moments; another one each time otherwise")
    return parser


def _print_outcome(outcome: Any) -> None:
    print_table(
        ("format", "saves", "scenario", "runs", "in a save", "holds the new", "the old", "wrong"),
        [_cells(row) for row in outcome.rows],
    )


def _cells(row: Any) -> tuple[str, ...]:
    scenario = f"{row.scenario} ({row.note})" if row.note else row.scenario
    return (
        row.subject.format,
        "async" if row.subject.asynchronous else "sync",
        scenario,
        str(row.runs),
        str(row.in_a_save),
        str(row.new),
        str(row.old),
        str(len(row.wrong)),
    )
