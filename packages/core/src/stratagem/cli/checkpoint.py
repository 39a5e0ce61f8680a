"""`stratagem checkpoint`: what is in a checkpoint, whether it is whole, and others made of it.

The commands that need torch are in files of their own, `durability.py` and `weights.py`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from stratagem.checkpoint.describe import Description, describe_checkpoint
from stratagem.cli.tables import print_table
from stratagem.cli.weights import average, convert
from stratagem.errors import CheckpointError
from stratagem_testing.durability.command import durability

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PathArgument = Annotated[
    str, typer.Argument(help="A checkpoint: a file, a directory, a URL.", show_default=False)
]
PathsArgument = Annotated[
    list[str],
    typer.Argument(help="Checkpoints: files, directories, URLs.", show_default=False),
]
SourceArgument = Annotated[
    Path, typer.Argument(help="A checkpoint: a file or a directory.", show_default=False)
]
TargetArgument = Annotated[Path, typer.Argument(help="The file to write.", show_default=False)]


def checkpoint_app() -> typer.Typer:
    """Return the commands about checkpoints."""
    app = typer.Typer(
        help="Look into checkpoints, check them, and make others of them.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command()(inspect)
    app.command()(verify)
    app.command()(consolidate)
    app.command()(convert)
    app.command()(average)
    app.command()(durability)
    return app


def inspect(path: PathArgument, *, as_json: JsonOption = False) -> None:
    """Show who saved a checkpoint, under what, and what is in it.

    Its manifest is read, a few hundred bytes at its end, whatever its size; nothing is checked. The
    exit code is 1 if it is no checkpoint.
    """
    try:
        description = describe_checkpoint(path)
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    facts = _facts(description)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    if description.manifest is None:
        print(f"{path} has no manifest: plain torch made it", file=sys.stderr)
    print_table(
        ("what", "value"),
        [
            (name.replace("_", " "), ", ".join(value) if name == "contents" else str(value))
            for name, value in facts.items()
            if value is not None
        ],
    )


def verify(paths: PathsArgument) -> None:
    """Read checkpoints whole and compare them with their checksums.

    A line for each. The exit code is 1 if one of them is damaged, or has no checksum.
    """
    failed = False
    for path in paths:
        try:
            description = describe_checkpoint(path, verify=True)
        except (CheckpointError, OSError) as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        if description.checksum is None:
            print(
                f"{path!r} cannot be verified: it has no checksum, plain torch made it. "
                "Load it and save it again to give it one",
                file=sys.stderr,
            )
            failed = True
        else:
            print(f"{path}: whole, {description.size} bytes, xxh3_128 {description.checksum}")
    if failed:
        raise typer.Exit(1)


def consolidate(source: SourceArgument, target: TargetArgument) -> None:
    """Make one file of a checkpoint that is a directory.

    It is checked first. The exit code is 1 if it is damaged, or the file is there already.
    """
    from stratagem.checkpoint import consolidate_checkpoint

    try:
        consolidate_checkpoint(source, target)
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"{target}: {target.stat().st_size} bytes")


def _facts(description: Description) -> dict[str, Any]:
    manifest = {} if description.manifest is None else asdict(description.manifest)
    checksum = None if description.checksum is None else f"xxh3_128 {description.checksum}"
    return {
        "bytes": description.size,
        "files": description.files,
        "checksum": checksum,
        **manifest,
    }
