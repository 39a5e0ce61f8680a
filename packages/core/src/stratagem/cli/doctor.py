"""`stratagem doctor`: what is installed, and what is wrong with it. stratagem-extras says more."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from stratagem import __version__
from stratagem.cli.console import print_table
from stratagem.cli.program import failed_commands, full_form, parse_short_form, plugins_checks
from stratagem.discovery import Check
from stratagem.discovery.installed import version_of
from stratagem.discovery.registry import PluginReport, Registry, get_registry
from stratagem.errors import format_text

SUMMARY = "Show what is installed and what is wrong with it."


def run(arguments: Sequence[str]) -> int:
    """Examine the installation and print the results; return the exit code: 1 with a problem.

    Raises:
        SystemExit: the arguments are wrong (exit code 2), or ask for help.
    """
    code = full_form("doctor", arguments)
    if code is not None:
        return code
    parse_short_form("doctor", SUMMARY, arguments)
    registry = get_registry()
    python, torch = sys.version.partition(" ")[0], version_of("torch") or "not installed"
    plugins = [(r.distribution, r.version, r.status) for r in registry.reports]
    installed = [("python", python, ""), ("torch", torch, ""), *plugins]
    print_table(("installed", "version", "status"), installed)
    kinds = ("accelerator", "precision", "checkpoint_io", "cluster_environment", "launcher")
    print()
    print_table(("kind", "names"), [(kind, ", ".join(registry.names(kind))) for kind in kinds])
    checks = [*failed_commands(registry), *misplaced_checks(registry), *plugins_checks(registry)]
    found = problems_of(registry.reports, ambiguous_names(registry), checks)
    print(f"\nProblems: {len(found)}" if found else "\nNo problem found.")
    for problem in found:
        print(f"- {problem}")
    print(f"\nIn full: pip install stratagem-extras=={__version__}")
    return int(bool(found))


def ambiguous_names(registry: Registry) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the qualified names that claim each ambiguous (kind, name)."""
    return {
        key: tuple(f"{holder.distribution}:{key[1]}" for holder in holders)
        for key, holders in registry.ambiguous().items()
    }


def misplaced_checks(registry: Registry) -> list[tuple[str, Check]]:
    """Return a failed check for each entry point in an unknown group."""
    return [("stratagem", Check("entry points", "error", why)) for why in registry.misplaced()]


def problems_of(
    reports: Iterable[PluginReport],
    ambiguous: Mapping[tuple[str, str], Sequence[str]],
    checks: Iterable[tuple[str, Check]],
) -> list[str]:
    """Return a line for each problem; a disabled plugin is not a problem.

    Args:
        reports: the status of each plugin.
        ambiguous: for each ambiguous (kind, name), the qualified names that claim it.
        checks: checks as (plugin, check), of which the failed ones are problems.
    """
    plugins = [(f"{report.distribution} ({report.entry_point})", report) for report in reports]
    failed_states = ("broken", "incompatible")
    lines = [f"{p} is {r.status}: {r.reason}" for p, r in plugins if r.status in failed_states]
    lines += [f"{plugin}: {note}" for plugin, report in plugins for note in report.notes]
    lines += [_ambiguity(*key, holders) for key, holders in ambiguous.items()]
    failed = ((plugin, check) for plugin, check in checks if check.status == "error")
    lines += [f"{plugin}: {check.name}: {check.detail}" for plugin, check in failed]
    return [format_text(line, 2000) for line in lines]


def _ambiguity(kind: str, name: str, holders: Sequence[str]) -> str:
    """Return the line on a name that several distributions provide."""
    if kind == "name":
        owners = ", ".join(holder.partition(":")[0] for holder in holders)
        return f"the import name {name!r} is provided more than once: uninstall one of {owners}"
    return f"the {kind} name {name!r} is ambiguous: choose one of {', '.join(holders)}"
