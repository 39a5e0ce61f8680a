"""The `stratagem` program. It does not import torch, so that `stratagem run` starts at once."""

from __future__ import annotations

import gc
import importlib
import io
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stratagem.launch.process import numpy_warned_once, open_standard_streams
from stratagem.lazy import lazy_exports

if TYPE_CHECKING:
    from stratagem.cli.console import (
        HelpFormatter as HelpFormatter,
        at_least as at_least,
        parser_of as parser_of,
        print_reasons as print_reasons,
        print_table as print_table,
        table_width as table_width,
    )
    from stratagem.cli.doctor import (
        ambiguous_names as ambiguous_names,
        misplaced_checks as misplaced_checks,
        problems_of as problems_of,
    )
    from stratagem.cli.program import (
        ask_plugins as ask_plugins,
        failed_commands as failed_commands,
        plugins_checks as plugins_checks,
    )
    from stratagem.cli.strategies import (
        asked_once as asked_once,
        environ_of_machine as environ_of_machine,
        print_failed_plugins as print_failed_plugins,
        why_not as why_not,
    )

    def __getattr__(name: str) -> Any: ...  # names that installed distributions add
else:
    __getattr__, _names = lazy_exports(__name__)

    def __dir__() -> list[str]:
        return ["main", *_names()]


Run = Callable[[Sequence[str]], int]
"""A command's function: it takes the arguments after the name and returns the exit code."""

COMMANDS = {
    "run": (
        "stratagem_torch.launch.run:run",
        "Run a script in several processes, one for each device.",
    ),
    "strategies": ("stratagem.cli.strategies:run", "List strategies, and what is usable here."),
    "doctor": ("stratagem.cli.doctor:run", "Show what is installed and what is wrong with it."),
    "errors": ("stratagem.cli.errors:run", "Explain an error that a message names."),
}
"""Core's commands: what users type, the function that runs it, and the line for `--help`.

Weights-only-safe data, like the commands of plugins (`stratagem.discovery.Command`), but read
before pluggy is imported. `run` is defined by stratagem-backend-torch. It stands here because ranks
start sooner if no plugin is searched."""

_SHORT = ("strategies", "explain", "doctor")
"""Commands that mostly import modules, so that garbage collection finds nothing to free. A plugin
that ends or hangs one of them is named."""


def main() -> int:
    """Run the program with this process's arguments; return its exit code."""
    open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths may hold bytes that cannot be encoded, and the locale may be C.
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:]
    stop = None
    if arguments[:1] and arguments[0] in _SHORT:
        gc.disable()
        from stratagem.cli.watcher import watch_plugins

        stop = watch_plugins()
    try:
        with numpy_warned_once():
            code = run_command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        if hasattr(select, "poll"):  # not on Windows
            output = select.poll()
            output.register(sys.stdout.fileno(), 0)
            if not output.poll(0):
                raise  # of another pipe
        # The reader of the output, such as `head`, has ended: write nothing more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        if stop is not None:
            stop()
    return code


def run_command(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name; return its exit code.

    A command of core imports only its own module. For other commands, the plugins are searched.

    Raises:
        SystemExit: the arguments of the command are wrong (exit code 2), or ask for help.
    """
    try:
        if found := COMMANDS.get(" ".join(arguments[:1])):
            module, _, function = found[0].partition(":")
            try:
                run: Run = getattr(importlib.import_module(module), function)
            except ModuleNotFoundError as error:
                if error.name != "stratagem_torch":
                    raise
                from stratagem.discovery.hints import installation_hint

                what = f"the command {arguments[0]!r}"
                hint = installation_hint("script", "launcher", what)
                print(f"stratagem {arguments[0]}: error: {hint}", file=sys.stderr)
                return 2
            return run(arguments[1:])
        from stratagem.cli.program import run_other

        return run_other(arguments)
    except KeyboardInterrupt:
        return 130  # as a shell reports Ctrl-C
