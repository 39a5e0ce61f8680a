"""The `stratagem` program where no command of core is named: help, and the commands of plugins."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from textwrap import indent

from stratagem import __version__
from stratagem.cli import COMMANDS, Run
from stratagem.cli.plugins import plugin_commands
from stratagem.cli.tables import aligned
from stratagem.discovery.registry import get_registry, nearest_of
from stratagem.discovery.specs import load_target
from stratagem.errors import PluginError

_HELP = ("--help", "-h")
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
            f"stratagem: {plugin}: {check.name}: {check.detail}. To go without this plugin, set "
            f"STRATAGEM_DISABLE_PLUGINS={plugin.partition(':')[0]}",
            file=sys.stderr,
        )
    for words in (2, 1):
        if found := of_plugins.get(" ".join(arguments[:words])):
            plugin, command = found
            try:
                run: Run = load_target(
                    command.target, what=f"the command {command.name!r} of {plugin}"
                )
            except PluginError as error:
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
    near = nearest_of(name, list(summaries))
    parts = [
        f"stratagem: error: No such command {name!r}.",
        *([f"Did you mean {near!r}?"] if near else []),
        *registry.possible_providers(name),
        f"`stratagem {group}{' ' * bool(group)}--help` lists all commands.",
    ]
    print(" ".join(parts), file=sys.stderr)
    return 2


def _help(group: str, summaries: Mapping[str, str]) -> str:
    """Return the list of commands, all of them or those whose first word is `group`."""
    prefix = f"{group} " if group else ""
    rows = [(name, text) for name, text in summaries.items() if name.startswith(prefix)]
    listed = f"commands:\n{indent(aligned(rows), '  ')}\n"
    if group:
        return f"usage: stratagem {prefix}COMMAND [arguments]\n\n{listed}\n{_MORE}"
    return f"""usage: stratagem COMMAND [arguments]

Train any PyTorch model with any strategy, selected by name.

{listed}
options:
  --help     show this message and exit
  --version  print the version and exit

{_MORE}"""
