"""The commands that plugins add to the program, each kept from stopping the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.discovery import Check
from stratagem.discovery.registry import Registry

if TYPE_CHECKING:
    import typer


def add_commands(app: typer.Typer, registry: Registry) -> list[tuple[str, Check]]:
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
            failures.append((implementation.plugin_name, failed_hook("stratagem_cli", error)))
    # Again, since of two commands with one name typer takes the later.
    app.registered_commands.extend(own)
    app.registered_groups.extend(own_groups)
    return failures


def failed_commands(registry: Registry) -> list[tuple[str, Check]]:
    """Return the plugins that cannot add their commands, where any has some."""
    if not registry.plugins.hook.stratagem_cli.get_hookimpls():
        return []
    import typer

    return add_commands(typer.Typer(), registry)


def failed_hook(hook: str, error: BaseException) -> Check:
    """Return the failed check that stands for an exception of a plugin's hook."""
    return Check(hook, "error", f"raised {type(error).__name__}: {error}")
