"""The commands of the `stratagem` program, read by typer; plugins may add more."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from stratagem import __version__
from stratagem.cli import AT_ONCE, module_of
from stratagem.cli.checkpoint import checkpoint_app
from stratagem.cli.plugins import add_commands
from stratagem.discovery.registry import get_registry
from stratagem_extras.cli import commands as training


def run_app() -> int:
    """Make the program and run it with this process's arguments; return its exit code."""
    app = core_app()
    for plugin, check in add_commands(app, get_registry()):
        print(f"stratagem: {plugin} cannot add its commands: {check.detail}", file=sys.stderr)
    app()
    return 0


def core_app() -> typer.Typer:
    """Return the program with the commands of core."""
    app = typer.Typer(
        name="stratagem",
        help="Train any PyTorch model with any strategy, selected by name.",
        no_args_is_help=True,
        add_completion=False,
        # Plain text: the same in a log as on a terminal, and like the help of `stratagem run`.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_program)
    # `main` answers these before typer is imported; here they are listed.
    answers = {name: module_of(name) for name in AT_ONCE}
    summaries = {name: module.SUMMARY for name, module in answers.items()} | training.SUMMARIES
    runs = {name: module.run for name, module in answers.items()}
    for name, summary in summaries.items():
        app.command(
            name,
            help=f"{summary} `stratagem {name} --help` says more.",
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(_passed_on_to(runs.get(name) or functools.partial(training.run, name)))
    app.add_typer(checkpoint_app(), name="checkpoint")
    return app


def _passed_on_to(run: Callable[[list[str]], int]) -> Callable[[typer.Context], None]:
    """Return a command that a function answers, with arguments that it reads itself."""

    def command(context: typer.Context) -> None:
        raise typer.Exit(run(context.args))

    return command


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"stratagem {__version__}")
        raise typer.Exit


def _program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass
