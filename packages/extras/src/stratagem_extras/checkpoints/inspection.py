"""`stratagem checkpoint inspect` and `verify`: what a checkpoint is, without torch."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem import storage
from stratagem.checkpoint import Description, check_exists, describe_checkpoint
from stratagem.cli import parser_of, print_table
from stratagem.discovery import get_registry
from stratagem.errors import (
    CheckpointError,
    CheckpointFormatError,
    UnknownNameError,
    format_names,
    format_text,
)

if TYPE_CHECKING:
    from stratagem.checkpoint import CheckpointIO

_INSPECT = """Show who saved a checkpoint, under what, and what is in it.

The command reads the manifest, a few hundred bytes at the end of the checkpoint, whatever its size.
It checks nothing. A checkpoint of a plugin's format is loaded instead. The exit code is 1 if no
installed format knows it.
"""

_VERIFY = """Read checkpoints whole and compare them with their checksums.

Each has a line of output. A checkpoint of a plugin's format is verified by that format. The exit
code is 1 if one of them is damaged, or has no checksum.
"""


def inspect(arguments: Sequence[str]) -> int:
    """Print a checkpoint's manifest; return the exit code."""
    parser = parser_of("checkpoint inspect", _INSPECT)
    parser.add_argument("path", help="a checkpoint: a file, a directory, a URL")
    _add_format(parser)
    options = parser.parse_args(arguments)
    try:
        found = _described(options.path, options.format)
        facts = (
            _facts_of_another(options.path, *found) if isinstance(found, tuple) else _facts(found)
        )
    except (CheckpointError, UnknownNameError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    if isinstance(found, Description) and found.manifest is None:
        print(f"{options.path} has no manifest: plain torch made it", file=sys.stderr)
    print_table(
        ("what", "value"),
        [
            (
                name.replace("_", " "),
                format_names(value, len(value)) if name == "contents" else str(value),
            )
            for name, value in facts.items()
            if value is not None
        ],
    )
    return 0


def verify(arguments: Sequence[str]) -> int:
    """Compare checkpoints with their checksums; return the exit code."""
    parser = parser_of("checkpoint verify", _VERIFY, json=False)
    parser.add_argument("paths", nargs="+", help="checkpoints: files, directories, URLs")
    _add_format(parser)
    options = parser.parse_args(arguments)
    failed = False
    for path in options.paths:
        try:
            description = _described(path, options.format, verify=True)
            if isinstance(description, tuple):
                name, checkpoint_io = description
                checkpoint_io.verify_checkpoint(path)
                print(f"{path}: whole, of the format {name!r}")
                continue
        except (CheckpointError, UnknownNameError, OSError) as error:
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
    return int(failed)


def _add_format(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--format", metavar="NAME", default="", help="of the checkpoint; the one that loads it"
    )


def _described(
    path: str, name: str, *, verify: bool = False
) -> Description | tuple[str, CheckpointIO]:
    """Return a checkpoint's description, or the plugin's format that can load it.

    Raises:
        CheckpointError, OSError: no installed format can load the checkpoint.
        UnknownNameError: no format has that name.
    """
    if name not in ("", "single_file", "directory"):
        return find_format(path, name)
    try:
        return describe_checkpoint(path, verify=verify)
    except (CheckpointFormatError, FileNotFoundError):
        if name and storage.exists(storage.to_location(path)):
            raise
        return find_format(path, name)


def find_format(path: str | Path, name: str = "") -> tuple[str, CheckpointIO]:
    """Return the checkpoint format that can load a checkpoint, as (name, object).

    Args:
        path: the path of the checkpoint, in a form that the format accepts.
        name: the name of a format, which is returned without a check. With "", each installed
            format tries to load the checkpoint.

    Raises:
        UnknownNameError: no format has that name.
        CheckpointNotFoundError: the path does not exist.
        CheckpointFormatError: no installed format can load the checkpoint. The error gives the
            reason for each format.

    Example:
        >>> import tempfile
        >>> from stratagem.checkpoint import SingleFileCheckpointIO
        >>> path = f"{tempfile.mkdtemp()}/a.ckpt"
        >>> SingleFileCheckpointIO().save_checkpoint({"step": 1}, path)
        >>> find_format(path, "single_file")[0]
        'single_file'
    """
    if name:
        return name, get_registry().find("checkpoint_io", name).spec.build()
    refusals = []
    for candidate in get_registry().candidates("checkpoint_io"):
        # The boundary at which any failure of a format becomes a line of the error.
        try:
            checkpoint_io: CheckpointIO = candidate.spec.build()
            if checkpoint_io.asynchronous:
                continue  # it writes in another one
            checkpoint_io.load_checkpoint(path)
            return candidate.spec.name, checkpoint_io
        except CheckpointFormatError:
            refusals.append(candidate.spec.name)
        except Exception as error:
            refusals.append(f"{candidate.spec.name} ({format_text(str(error), 300)})")
    check_exists(storage.to_location(os.fspath(path)))
    raise CheckpointFormatError(
        f"{str(path)!r} is not a whole checkpoint of any installed format: {', '.join(refusals)}"
    )


def _facts_of_another(path: str, name: str, checkpoint_io: CheckpointIO) -> dict[str, Any]:
    """Return facts of a checkpoint in a plugin's format; this reads the whole checkpoint."""
    contents = checkpoint_io.load_checkpoint(path)
    known = ("epoch", "global_step", "run")
    return {
        "format": name,
        **{key: contents[key] for key in known if isinstance(contents.get(key), (int, str))},
        "contents": [format_text(str(key)) for key in contents],
    }


def _facts(description: Description) -> dict[str, Any]:
    manifest = asdict(description.manifest) if description.manifest else {}
    checksum = None if description.checksum is None else f"xxh3_128 {description.checksum}"
    return {
        "bytes": description.size,
        "files": description.files,
        "checksum": checksum,
        **manifest,
    }
