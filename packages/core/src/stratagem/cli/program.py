"""The part of the `stratagem` program beyond core's commands: help, and commands of plugins."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from stratagem import __version__
from stratagem.cli import COMMANDS, Run
from stratagem.cli.console import aligned, parser_of, table_width
from stratagem.discovery import Check, Command, registry as discovery
from stratagem.discovery.entry_points import CORE
from stratagem.discovery.hints import distribution_of
from stratagem.discovery.installed import why_missing
from stratagem.discovery.registry import Registry, get_registry, nearest_of
from stratagem.discovery.specs import load_target
from stratagem.errors import MissingPackageError, PluginError, StratagemError, format_text

Item = TypeVar("Item")


def ask_plugins(
    registry: Registry, hook: str, kind: type[Item], **arguments: object
) -> Iterator[tuple[str, Item | Check]]:
    """Yield the items that each plugin returns from a hook, as (plugin, item).

    If a plugin fails, or returns another type, a failed check is yielded instead of the item.

    Args:
        registry: the registry of plugins.
        hook: the name of a hook that returns an iterable.
        kind: the class of the items.
        **arguments: the arguments of the hook.
    """
    for implementation in getattr(registry.plugins.hook, hook).get_hookimpls():
        plugin = implementation.plugin_name
        discovery.announce(plugin)
        # The boundary that isolates a plugin's failure from the other plugins.
        try:
            taken = [arguments[name] for name in implementation.argnames]
            for item in implementation.function(*taken):
                if not isinstance(item, kind):
                    place = "stratagem.discovery." if kind in (Check, Command) else ""
                    raise TypeError(f"{hook}() returned {item!r}; expected {place}{kind.__name__}")
                yield plugin, item
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            yield (
                plugin,
                Check(hook, "error", format_text(f"raised {type(error).__name__}: {error}", 1000)),
            )
        discovery.announce("")


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
    """Return the owner of a command that is ambiguous with this one, or ""."""
    for plugin, name in others:
        # "checkpoint" and "checkpoint verify" clash: the second word would be an argument.
        if f"{name} ".startswith(f"{command.name} ") or f"{command.name} ".startswith(f"{name} "):
            return f"{plugin} has the command {name!r}"
    return ""


def failed_commands(registry: Registry) -> list[tuple[str, Check]]:
    """Return the problems of plugins' commands, as (plugin, check), without importing targets."""
    found, failures = plugin_commands(registry)
    for plugin, command in found.values():
        if why := why_missing(command.target):
            failures.append((plugin, Check(f"command {command.name!r}", "error", why)))
    return failures


def plugins_checks(registry: Registry) -> list[tuple[str, Check]]:
    """Return the plugins' checks of themselves, as (plugin, check)."""
    return list(ask_plugins(registry, "stratagem_doctor", Check))


def full_form(command: str, arguments: Sequence[str]) -> int | None:
    """Run the full form of a command of core; return its exit code.

    The full form is the function `stratagem.cli.COMMAND_report`, which stratagem-extras provides.
    If no such function can be imported, the result is None, and core prints its short form.

    Args:
        command: "doctor" or "strategies".
        arguments: the command's arguments.
    """
    registry, name = get_registry(), f"stratagem.cli.{command}_report"
    if not registry.has("name", name):
        return None
    try:
        run: Run = registry.find("name", name).spec.load()
    except StratagemError as error:
        print(f"stratagem {command}: {error}", file=sys.stderr)
        return None
    return run(arguments)


def parse_short_form(command: str, summary: str, arguments: Sequence[str]) -> None:
    """Parse the arguments of a command's short form, which takes no arguments.

    Raises:
        SystemExit: the user passed arguments (exit code 2, with the package to install), or
            `--help`.
    """
    more = "This is the short form. In full, with --json: pip install stratagem-extras"
    parser = parser_of(command, f"{summary}\n\n{more}", json=False)
    _, rest = parser.parse_known_args(arguments)
    if rest:
        who = get_registry().possible_providers(f"{command}_report", "stratagem.cli")
        parser.error(f"{rest[0]} is an option of the full form. {' '.join(who)}")


_HELP = ("--help", "-h")
_MEANT = {"checkpoint show": "checkpoint inspect", "train": "fit", "list": "strategies"}
"""Names that users may try, and the matching commands."""
_MORE = "`stratagem COMMAND --help` shows the options of a command."


def run_other(arguments: Sequence[str]) -> int:
    """Run a plugin's command, or print the version, the list of commands or an error.

    Returns the exit code: 2 if the arguments name no command, 1 if a plugin's command is broken.
    """
    if list(arguments) == ["--version"]:
        print(f"stratagem {__version__}")
        return 0
    registry = get_registry()
    of_plugins, failures = plugin_commands(registry)
    for plugin, check in failures:
        print(
            f"stratagem: {plugin}: {format_text(check.name)}: {format_text(check.detail, 1000)}. "
            f"To go without this plugin, set STRATAGEM_DISABLE_PLUGINS={plugin.partition(':')[0]}",
            file=sys.stderr,
        )
    for words in (2, 1):
        if found := of_plugins.get(" ".join(arguments[:words])):
            plugin, command = found
            try:
                run: Run = load_target(
                    command.target, what=f"the command {command.name!r} of {plugin}"
                )
            except (PluginError, MissingPackageError) as error:
                print(f"stratagem {command.name}: error: {error}", file=sys.stderr)
                return 1
            return run(arguments[words:])
    summaries = {name: summary for name, (_, summary) in COMMANDS.items()}
    summaries |= {name: command.summary for name, (_, command) in of_plugins.items()}
    groups = {name.partition(" ")[0] for name in summaries if " " in name}
    group = arguments[0] if arguments and arguments[0] in groups else ""
    rest = arguments[1:] if group else arguments
    if not rest or rest[0] in _HELP:
        print(_help(group, summaries), file=sys.stdout if rest else sys.stderr)
        return 0 if rest else 2
    name = f"{group} {rest[0]}".strip()
    if any(check.name == f"command {name!r}" for _, check in failures):
        return 2  # the lines above say why it cannot be called
    # Without its plugin, the first word of a command of two words is unknown, too.
    both = " ".join(arguments[:2])
    missing = both if distribution_of(both, "command") else name
    near = _MEANT.get(name) or nearest_of(name, list(summaries))
    parts = [
        f"stratagem: error: No such command {name!r}.",
        *([f"Did you mean {near!r}?"] if near else []),
        *registry.possible_providers(missing),
        f"`stratagem {group}{' ' * bool(group)}--help` lists all commands.",
    ]
    print(" ".join(parts), file=sys.stderr)
    return 2


def _help(group: str, summaries: Mapping[str, str]) -> str:
    """Return the list of all commands, or of commands with the first word `group`."""
    from textwrap import indent  # only the list of commands needs it

    prefix = f"{group} " if group else ""
    rows = [(name, text) for name, text in summaries.items() if name.startswith(prefix)]
    listed = f"commands:\n{indent(aligned(rows, table_width() - 2), '  ')}\n"
    if group:
        return f"usage: stratagem {prefix}COMMAND [arguments]\n\n{listed}\n{_MORE}"
    return f"""usage: stratagem COMMAND [arguments]

Train any PyTorch model with any strategy, selected by name.

{listed}
options:
  --help     show this message and exit
  --version  print the version and exit

{_MORE}"""
