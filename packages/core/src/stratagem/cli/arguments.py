"""Parsers of the commands' arguments."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def parser_of(command: str, description: str, *, json: bool = True) -> argparse.ArgumentParser:
    """Return a parser of a command's arguments.

    Args:
        command: its name.
        description: what `--help` says; the lines stay as they are.
        json: whether it takes `--json`.
    """
    parser = argparse.ArgumentParser(
        prog=f"stratagem {command}",
        description=description,
        formatter_class=_formatter,
        # What an option means must not change when another one comes with the same beginning.
        allow_abbrev=False,
    )
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def at_least(lowest: Number) -> Callable[[str], Number]:
    """Return the type of an option that takes numbers from `lowest` on, whole ones if it is one."""
    kind = type(lowest)
    what = "a whole number" if kind is int else "a number"

    def number(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= lowest:
            raise argparse.ArgumentTypeError(
                f"expected {what} of at least {lowest}, received {text!r}"
            )
        return value

    return number


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Return what formats help; with a width it imports no shutil, which brings bz2 and lzma."""
    try:
        width = int(os.environ.get("COLUMNS") or os.get_terminal_size().columns)
    except (ValueError, OSError):
        width = 80
    return argparse.RawDescriptionHelpFormatter(prog, width=width - 2)
