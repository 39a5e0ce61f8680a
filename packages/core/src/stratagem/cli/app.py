"""The commands of the `stratagem` program, read by typer; plugins may add more."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from stratagem._version import __version__
from stratagem.cli import checkpoint as checkpoints
from stratagem.cli import doctor as doctors
from stratagem.cli import run as runs
from stratagem.cli.strategies import listed_strategies
from stratagem.cli.tables import print_table
from stratagem.discovery import Check
from stratagem.discovery.registry import Registry, get_registry
from stratagem.errors import StratagemError
from stratagem.plan.plan import RunRequest
from stratagem.plan.resolve import resolve

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def run_app() -> int:
    """Make the program and run it with this process's arguments; return its exit code."""
    app = core_app()
    failures = add_plugins_commands(app, get_registry())
    for plugin, check in failures:
        print(f"stratagem: {plugin} cannot add its commands: {check.detail}", file=sys.stderr)
    app(obj=failures)
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
    app.command()(strategies)
    app.command()(explain)
    app.command()(doctor)
    app.add_typer(checkpoints.checkpoint_app(), name="checkpoint")
    # `main` answers this one before typer is imported; here it is listed.
    app.command(
        "run",
        help=f"{runs.SUMMARY} `stratagem run --help` says more.",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )(_run)
    return app


def add_plugins_commands(app: typer.Typer, registry: Registry) -> list[tuple[str, Check]]:
    """Let every plugin add its commands; return the failures, by plugin.

    The names of core's commands stay with core.
    """
    failures = []
    own, own_groups = list(app.registered_commands), list(app.registered_groups)
    for implementation in registry.plugins.hook.stratagem_cli.get_hookimpls():
        # The boundary at which one plugin's failure is kept from the program.
        try:
            implementation.function(*([app] if implementation.argnames else []))
        except (Exception, SystemExit) as error:
            failures.append(
                (implementation.plugin_name, doctors.failed_hook("stratagem_cli", error))
            )
    # Again, since of two commands with one name typer takes the later.
    app.registered_commands.extend(own)
    app.registered_groups.extend(own_groups)
    return failures


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


def strategies(*, as_json: JsonOption = False) -> None:
    """List all strategies and what can be used here."""
    registry = get_registry()
    rows = listed_strategies(registry, os.environ)
    if as_json:
        print(json.dumps([{**asdict(row), "usable": row.usable} for row in rows], indent=2))
        return
    print_table(
        ("name", "aliases", "distribution", "accelerators", "summary", "usable here"),
        [
            (
                row.name,
                ", ".join(row.aliases),
                f"{row.distribution} {row.version}",
                "any" if row.accelerators is None else ", ".join(row.accelerators),
                row.summary,
                "yes" if row.usable else f"no: {row.why_not}",
            )
            for row in rows
        ],
    )
    failed = [report for report in registry.reports if report.status in ("broken", "incompatible")]
    if failed:
        print(
            f"{len(failed)} plugin(s) could not be loaded: `stratagem doctor` says why",
            file=sys.stderr,
        )


def explain(
    *,
    strategy: Annotated[str, typer.Option(help="A name, or auto.")] = "auto",
    accelerator: Annotated[str, typer.Option(help="A name, or auto.")] = "auto",
    devices: Annotated[
        str, typer.Option(help="How many, which ('0,2'), -1 for all, or auto.")
    ] = "auto",
    num_nodes: Annotated[int, typer.Option(help="Machines that take part.")] = 1,
    precision: Annotated[str, typer.Option(help="A name, or 64, 32, 16, bf16.")] = "32-true",
    checkpoint_io: Annotated[
        str | None, typer.Option(help="A name; the default otherwise.", show_default=False)
    ] = None,
    cluster_environment: Annotated[
        str | None, typer.Option(help="A name; detected otherwise.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a request would use, and why.

    The request is that of a Trainer or Lite with these arguments, in a script. Nothing is started.
    One that cannot be met ends with its error and exit code 2.
    """
    request = RunRequest(
        strategy=strategy,
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        precision=precision,
        checkpoint_io=checkpoint_io,
        cluster_environment=cluster_environment,
        interactive=False,
    )
    try:
        plan = resolve(request, get_registry())
    except StratagemError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        fields = ("what", "choice", "provider", "why")
        print(json.dumps([dict(zip(fields, row, strict=True)) for row in plan.rows()], indent=2))
    else:
        print(plan.explain())


def doctor(
    context: typer.Context,
    *,
    as_json: JsonOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the tracebacks of broken plugins.")
    ] = False,
) -> None:
    """Show what is installed and what is wrong with it.

    That is: versions, plugins, components, the machine, and what the plugins say of themselves.
    The exit code is 1 if a plugin is broken or incompatible, a name is ambiguous or a check failed.
    A disabled plugin is not an error.
    """
    diagnosis = doctors.examine(get_registry(), os.environ, checks=context.obj or ())
    if as_json:
        print(json.dumps(doctors.as_data(diagnosis), indent=2))
    else:
        doctors.print_diagnosis(diagnosis, verbose=verbose)
    if diagnosis.problems():
        raise typer.Exit(1)


def _run(context: typer.Context) -> None:
    raise typer.Exit(runs.run(context.args))
