"""What plugins bring to the program by its hooks, each kept from stopping the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from stratagem.cli import COMMANDS, guests
from stratagem.discovery import Check, Command
from stratagem.discovery.entry_points import CORE
from stratagem.discovery.registry import Registry, get_registry
from stratagem.discovery.targets import why_missing

Item = TypeVar("Item")


def registry_with_guests() -> Registry:
    """Return this process's registry, in which `stratagem.cli.guests` is a plugin too."""
    registry = get_registry()
    if not registry.plugins.is_registered(guests):
        registry.plugins.register(guests, name=f"{CORE}:guests")
    return registry


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
    offers: list[tuple[str, Command]] = []
    failures: list[tuple[str, Check]] = []
    for plugin, item in ask_plugins(registry, "stratagem_cli", Command):
        if isinstance(item, Check):
            failures.append((plugin, item))
        else:
            offers.append((plugin, item))
    found: dict[str, tuple[str, Command]] = {}
    for plugin, command in offers:
        taken = [(CORE, name) for name in COMMANDS]
        if not _is_of_core(plugin):
            taken += [(other, theirs.name) for other, theirs in offers if theirs is not command]
        who = next((pair for pair in taken if _clash(command.name, pair[1])), None)
        if who is None:
            found[command.name] = plugin, command
            continue
        wins = "which wins" if _is_of_core(who[0]) else "so that neither can be called"
        detail = f"{who[0]} has the command {who[1]!r}, {wins}: one of them needs another name"
        failures.append((plugin, Check(f"command {command.name!r}", "error", detail)))
    return found, failures


def _is_of_core(plugin: str) -> bool:
    return plugin.partition(":")[0] == CORE


def _clash(name: str, other: str) -> bool:
    """Return whether two names of commands are the same, or one has the other as its first word."""
    return f"{name} ".startswith(f"{other} ") or f"{other} ".startswith(f"{name} ")


def failed_commands(registry: Registry) -> list[tuple[str, Check]]:
    """Return what is wrong with the commands of plugins, by plugin, without importing a target."""
    found, failures = plugin_commands(registry)
    for plugin, command in found.values():
        if why := why_missing(command.target):
            failures.append((plugin, Check(f"command {command.name!r}", "error", why)))
    return failures
