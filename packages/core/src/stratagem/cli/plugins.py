"""What plugins bring to the program by its hooks, each kept from stopping the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from stratagem.cli import COMMANDS
from stratagem.discovery import Check, Command
from stratagem.discovery.entry_points import CORE
from stratagem.discovery.registry import Registry
from stratagem.discovery.targets import why_missing

Item = TypeVar("Item")


def ask_plugins(
    registry: Registry, hook: str, kind: type[Item], **arguments: object
) -> Iterator[tuple[str, Item | Check]]:
    """Yield what each plugin returns from a hook, as (plugin, item).

    If one fails, or returns something else, a failed check stands for what it would have returned.

    Args:
        registry: has the plugins.
        hook: its name; it returns an iterable.
        kind: the class of the items.
        **arguments: the hook's.
    """
    for implementation in getattr(registry.plugins.hook, hook).get_hookimpls():
        plugin = implementation.plugin_name
        # The boundary at which one plugin's failure is kept from the others.
        try:
            taken = [arguments[name] for name in implementation.argnames]
            for item in implementation.function(*taken):
                if not isinstance(item, kind):
                    place = "stratagem.discovery." if kind in (Check, Command) else ""
                    raise TypeError(f"{hook}() returned {item!r}; expected {place}{kind.__name__}")
                yield plugin, item
        except (Exception, SystemExit) as error:
            yield plugin, Check(hook, "error", f"raised {type(error).__name__}: {error}")


def plugin_commands(
    registry: Registry,
) -> tuple[dict[str, tuple[str, Command]], list[tuple[str, Check]]]:
    """Return the commands of plugins, as {name: (plugin, command)}, and failures by plugin."""
    found: dict[str, tuple[str, Command]] = {}
    offers: list[tuple[str, Command]] = []
    failures: list[tuple[str, Check]] = []
    for plugin, item in ask_plugins(registry, "stratagem_cli", Command):
        if isinstance(item, Check):
            failures.append((plugin, item))
        else:
            offers.append((plugin, item))
    reserved = [(CORE, name) for name in COMMANDS]
    allowed = []
    for plugin, command in offers:
        if clash := _clash(command, reserved):
            detail = f"{clash}, which wins: give this one another name"
            failures.append((plugin, Check(f"command {command.name!r}", "error", detail)))
        else:
            allowed.append((plugin, command))
    for plugin, command in allowed:
        others = [(other, theirs.name) for other, theirs in allowed if theirs is not command]
        if clash := _clash(command, others):
            detail = f"{clash}, so that neither can be called: give one of them another name"
            failures.append((plugin, Check(f"command {command.name!r}", "error", detail)))
        else:
            found[command.name] = plugin, command
    return found, failures


def _clash(command: Command, others: Iterable[tuple[str, str]]) -> str:
    """Return who has a command that cannot be told from this one; "": nobody."""
    for plugin, name in others:
        # "checkpoint" and "checkpoint verify" clash: the second word would be an argument.
        if f"{name} ".startswith(f"{command.name} ") or f"{command.name} ".startswith(f"{name} "):
            return f"{plugin} has the command {name!r}"
    return ""


def failed_commands(registry: Registry) -> list[tuple[str, Check]]:
    """Return what is wrong with the commands of plugins, by plugin, without importing a target."""
    found, failures = plugin_commands(registry)
    for plugin, command in found.values():
        if why := why_missing(command.target):
            failures.append((plugin, Check(f"command {command.name!r}", "error", why)))
    return failures
