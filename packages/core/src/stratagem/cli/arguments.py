"""Arguments of the commands that do without typer."""

from __future__ import annotations

import argparse


def parser_of(command: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of a command's arguments, which takes `--json`.

    Args:
        command: its name.
        description: what `--help` says; the lines stay as they are.
    """
    parser = argparse.ArgumentParser(
        prog=f"stratagem {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # What an option means must not change when another one comes with the same beginning.
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
