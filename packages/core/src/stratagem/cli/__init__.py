"""The `stratagem` program. Nothing here imports torch: `stratagem run` must start ranks at once."""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stratagem.discovery.exports import exporter
from stratagem.launch.streams import open_standard_streams

if TYPE_CHECKING:
    from stratagem.cli.arguments import parser_of as parser_of
    from stratagem.cli.doctor import (
        SLOW_IMPORT as SLOW_IMPORT,
        listed_component as listed_component,
        plugins_checks as plugins_checks,
    )
    from stratagem.cli.plugins import failed_commands as failed_commands
    from stratagem.cli.strategies import why_not as why_not
    from stratagem.cli.tables import print_table as print_table

    def __getattr__(name: str) -> Any: ...  # names that installed distributions add
else:
    __getattr__, __dir__ = exporter(
        __name__,
        None,
        {
            "stratagem.cli.arguments": "parser_of",
            "stratagem.cli.doctor": "SLOW_IMPORT listed_component plugins_checks",
            "stratagem.cli.plugins": "failed_commands",
            "stratagem.cli.strategies": "why_not",
            "stratagem.cli.tables": "print_table",
        },
    )


AT_ONCE = ("run", "strategies", "explain", "doctor", "new-backend")
"""Commands whose modules read their own arguments, without typer, which costs more than they do.
Ranks wait for the first; the others are asked often, by people and by programs."""


TRAINING = ("fit", "validate", "test", "predict")
"""Commands that run a Trainer, which `stratagem_extras.cli.commands` answers."""


def module_of(command: str) -> ModuleType:
    """Return the module that answers one of the commands in `AT_ONCE`."""
    return importlib.import_module(f"stratagem.cli.{command.replace('-', '_')}")


def main() -> int:
    """Run the program with this process's arguments; return its exit code."""
    open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths may hold bytes that no encoding knows, and the locale may be C.
        sys.stdout.reconfigure(errors="backslashreplace")
    command, *arguments = sys.argv[1:] or [""]
    if command in TRAINING:
        from stratagem_extras.cli import commands as training

        return training.run(command, arguments)
    if command not in AT_ONCE:
        from stratagem.cli.app import run_app

        return run_app()
    if command != "run":
        # A listing is mostly imports, of which nothing is garbage before the process ends.
        gc.disable()
    try:
        code: int = module_of(command).run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads the output has enough, as `head` has; nothing more must be written to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
