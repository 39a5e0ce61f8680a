"""`stratagem checkpoint`: what is in a checkpoint file, and whether it is whole; without torch.

The commands that need torch are in files of their own, `torture.py` and `weights.py`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from stratagem.checkpoint_archive import (
    Archive,
    check_entries,
    read_archive,
    verify_checksum,
)
from stratagem.cli.tables import print_table
from stratagem.cli.torture import torture
from stratagem.cli.weights import average, convert
from stratagem.errors import CheckpointError

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PathArgument = Annotated[Path, typer.Argument(help="A checkpoint file.", show_default=False)]
PathsArgument = Annotated[list[Path], typer.Argument(help="Checkpoint files.", show_default=False)]


def checkpoint_app() -> typer.Typer:
    """Return the commands about checkpoints."""
    app = typer.Typer(
        help="Look into checkpoints, check them, and make others of them.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command()(inspect)
    app.command()(verify)
    app.command()(convert)
    app.command()(average)
    app.command()(torture)
    return app


def inspect(path: PathArgument, *, as_json: JsonOption = False) -> None:
    """Show who saved a checkpoint, under what, and what is in it.

    Its manifest is read, a few hundred bytes at its end, whatever its size; nothing is checked. The
    exit code is 1 if it is no checkpoint.
    """
    try:
        with path.open("rb") as file:
            archive = read_archive(file, str(path))
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    facts = _facts(archive)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    if archive.manifest is None:
        print(f"{path} has no manifest: plain torch.save made it", file=sys.stderr)
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
            with path.open("rb") as file:
                archive = read_archive(file, str(path))
                verify_checksum(file, archive, str(path))
                check_entries(file, archive, str(path))
        except (CheckpointError, OSError) as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        if archive.checksum is None:
            print(
                f"{str(path)!r} cannot be verified: it has no checksum, plain torch.save made it. "
                "Load it and save it again to give it one",
                file=sys.stderr,
            )
            failed = True
        else:
            print(f"{path}: whole, {archive.size} bytes, xxh3_128 {archive.checksum}")
    if failed:
        raise typer.Exit(1)


def _facts(archive: Archive) -> dict[str, Any]:
    manifest = {} if archive.manifest is None else asdict(archive.manifest)
    checksum = None if archive.checksum is None else f"xxh3_128 {archive.checksum}"
    return {"bytes": archive.size, "checksum": checksum, **manifest}
