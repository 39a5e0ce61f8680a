"""What this distribution provides, as data; nothing is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from stratagem.discovery import Command, ComponentSpec, hookimpl


@hookimpl
def stratagem_cli() -> Iterable[Command]:
    """Return the commands for authors of plugins."""
    return (
        Command(
            "new-backend",
            "Write a new distribution with a strategy or another component of your own.",
            "stratagem_testing.author.new_backend:run",
        ),
        Command(
            "checkpoint durability",
            "Break saves in every way, and see whether a whole checkpoint is left each time.",
            "stratagem_testing.durability.command:run",
        ),
    )


@hookimpl
def stratagem_check_spec(spec: ComponentSpec) -> Iterable[str]:
    """Return the broken promises of a spec."""
    from stratagem.discovery import get_registry
    from stratagem_testing.author.spec_checks import check_spec

    return check_spec(spec, get_registry())


@hookimpl
def stratagem_examine(distribution: str, as_json: bool, verbose: bool) -> int:
    """Print the answer to `stratagem doctor NAME`."""
    from stratagem_testing.author.doctor import examine

    return examine(distribution, as_json=as_json, verbose=verbose)
