"""Arguments of the commands that do without typer."""

from __future__ import annotations

import argparse
import os


def parser_of(command: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of a command's arguments, which takes `--json`.

    Args:
        command: its name.
        description: what `--help` says; the lines stay as they are.
    """
    parser = argparse.ArgumentParser(
        prog=f"stratagem {command}",
        description=description,
        formatter_class=_formatter,
        # What an option means must not change when another one comes with the same beginning.
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Return what formats help; with a width it imports no shutil, which brings bz2 and lzma."""
    try:
        width = int(os.environ.get("COLUMNS") or os.get_terminal_size().columns)
    except (ValueError, OSError):
        width = 80
    return argparse.RawDescriptionHelpFormatter(prog, width=width - 2)
