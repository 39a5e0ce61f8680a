"""`stratagem checkpoint inspect`, `verify` and `consolidate`.

The commands that need torch are in files of their own, `durability.py` and `weights.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stratagem.checkpoint.catalog import Description, describe_checkpoint
from stratagem.cli.console import parser_of, print_table
from stratagem.errors import CheckpointError, format_names

_INSPECT = """Show who saved a checkpoint, under what, and what is in it.

The command reads the manifest, a few hundred bytes at the end of the checkpoint, whatever its size.
It checks nothing. The exit code is 1 if it is no checkpoint.
"""

_VERIFY = """Read checkpoints whole and compare them with their checksums.

Each has a line of output. The exit code is 1 if one of them is damaged, or has no checksum.
"""

_CONSOLIDATE = """Make one file of a checkpoint that is a directory.

The checkpoint is checked first. The exit code is 1 if it is damaged, or the file is there already.
"""


def inspect(arguments: Sequence[str]) -> int:
    """Print a checkpoint's manifest; return the exit code."""
    parser = parser_of("checkpoint inspect", _INSPECT)
    parser.add_argument("path", help="a checkpoint: a file, a directory, a URL")
    options = parser.parse_args(arguments)
    try:
        description = describe_checkpoint(options.path)
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    facts = _facts(description)
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    if description.manifest is None:
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
    failed = False
    for path in parser.parse_args(arguments).paths:
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
    return int(failed)


def consolidate(arguments: Sequence[str]) -> int:
    """Make one file of a directory; return the exit code."""
    parser = parser_of("checkpoint consolidate", _CONSOLIDATE, json=False)
    parser.add_argument("source", type=Path, help="a checkpoint: a file or a directory")
    parser.add_argument("target", type=Path, help="the file to write")
    options = parser.parse_args(arguments)
    from stratagem.checkpoint import consolidate_checkpoint

    try:
        consolidate_checkpoint(options.source, options.target)
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.target}: {options.target.stat().st_size} bytes")
    return 0


def _facts(description: Description) -> dict[str, Any]:
    manifest = asdict(description.manifest) if description.manifest else {}
    checksum = None if description.checksum is None else f"xxh3_128 {description.checksum}"
    return {
        "bytes": description.size,
        "files": description.files,
        "checksum": checksum,
        **manifest,
    }
