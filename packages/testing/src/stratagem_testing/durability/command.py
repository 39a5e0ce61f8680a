"""`stratagem checkpoint durability`: whether checkpoints survive on a file system."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stratagem.cli import print_table
from stratagem.discovery import load_target


def durability(
    directory: Annotated[
        Path, typer.Argument(help="Where to save; on the file system in question.")
    ],
    *,
    kills: Annotated[int, typer.Option(help="Kills of writers while they save.", min=1)] = 20,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="A format's name, or several; all otherwise."),
    ] = None,
    asynchronous: Annotated[
        bool | None, typer.Option("--async/--no-async", help="Both otherwise.", show_default=False)
    ] = None,
    size: Annotated[float, typer.Option(help="Megabytes of a checkpoint.", min=0.1)] = 16.0,
    seed: Annotated[
        int | None, typer.Option(help="Of the random moments; another one each time otherwise.")
    ] = None,
) -> None:
    """Break saves in every way, and see whether a whole checkpoint is left each time.

    Writers are killed at random moments, also where the disk is slow and where two ranks write; the
    disk is full, fails to sync, or is read-only. After each, the path must hold the checkpoint that
    was durable last, or one that was begun after it, and nothing else may be left in the directory.
    The exit code is 1 if that was not so once.
    """
    if not directory.is_dir():
        print(
            f"{str(directory)!r} is not a directory: expected one that is there, on the file "
            "system in question; make it first",
            file=sys.stderr,
        )
        raise typer.Exit(2)
    seed = random.randrange(10**6) if seed is None else seed
    # By name: the program does without torch, and this command cannot.
    run = load_target("stratagem_testing.durability.harness:run", what="the harness")
    outcome = run(
        directory,
        names=_known_formats(formats),
        ways=(False, True) if asynchronous is None else (asynchronous,),
        kills=kills,
        megabytes=size,
        seed=seed,
    )
    _print_outcome(outcome)
    print(
        f"seed {seed}; checkpoints of {size:g} MB in {directory}; TMPDIR {outcome.temporary}, "
        f"{'on another' if outcome.is_elsewhere else 'on the same'} file system"
    )
    wrong = [(row, what) for row in outcome.rows for what in row.wrong]
    for row, what in wrong:
        print(f"{row.subject.format}, {row.scenario}: {what}", file=sys.stderr)
    if wrong:
        print(f"\nWhat the processes printed:\n{outcome.log}", file=sys.stderr)
        raise typer.Exit(1)


def _known_formats(asked: list[str] | None) -> list[str]:
    """Return the formats that were asked for, or all; exit where one is unknown."""
    formats = load_target("stratagem_testing.durability.harness:formats", what="the harness")
    known: list[str] = list(formats())
    names = list(asked or known)
    if unknown := sorted(set(names) - set(known)):
        print(
            f"--format {unknown[0]!r}: there is no such checkpoint format; there are "
            f"{', '.join(known)}",
            file=sys.stderr,
        )
        raise typer.Exit(2)
    return names


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
