"""`stratagem strategies`: all strategies, their distributions, and whether they work here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stratagem.cli import (
    asked_once,
    environ_of_machine,
    parser_of,
    print_failed_plugins,
    print_reasons,
    print_table,
    table_width,
    why_not,
)
from stratagem.discovery import (
    FIRST,
    Availability,
    Candidate,
    ComponentSpec,
    Registry,
    StrategySpec,
    get_registry,
    says_its_preset,
)
from stratagem.errors import ConfigurationError

SUMMARY = "List strategies, and what is usable here."

_WIDE = 100
"""The number of columns from which on the listing has a column of distributions."""

Probe = Callable[[Any], Availability]
"""Returns the devices that an accelerator (its spec, or an object) finds on this machine."""


@dataclass(frozen=True)
class ListedStrategy:
    """A strategy as the listing shows it.

    Attributes:
        name: the name that selects it; qualified if the plain name is ambiguous or means another
            strategy.
        aliases: further names, in the same form.
        distribution, version: the distribution that provides it.
        accelerators: the accelerators that it runs on; None for any.
        summary: a one-line description.
        why_not: the reason why the strategy is unavailable on this machine, or "".
        says_its_preset: whether its name consists of another name and its preset arguments.
    """

    name: str
    aliases: tuple[str, ...]
    distribution: str
    version: str
    accelerators: tuple[str, ...] | None
    summary: str
    why_not: str
    says_its_preset: bool

    @property
    def usable(self) -> bool:
        """Whether a request for it can be met on this machine."""
        return not self.why_not


def strategies(arguments: Sequence[str]) -> int:
    """Print the listing; return the exit code.

    Raises:
        SystemExit: the arguments are wrong (exit code 2), or ask for help.
    """
    parser = parser_of("strategies", SUMMARY)
    parser.add_argument(
        "--all", action="store_true", help="also those whose names only say what is preset"
    )
    options = parser.parse_args(arguments)
    registry = get_registry()
    rows = listed_strategies(registry, os.environ)
    if options.json:
        import json

        print(json.dumps([{**asdict(row), "usable": row.usable} for row in rows], indent=2))
        return 0
    shown = [row for row in rows if options.all or not row.says_its_preset]
    shown.sort(key=lambda row: not row.usable)
    # A narrow terminal has no room for the distributions.
    wide = table_width() >= _WIDE
    print_table(
        ("strategy", "usable here", *(["distribution"] * wide), "summary"),
        [
            (
                row.name,
                "yes" if row.usable else "no",
                *([f"{row.distribution} {row.version}"] * wide),
                row.summary + f" (also {', '.join(row.aliases)})" * bool(row.aliases),
            )
            for row in shown
        ],
    )
    print_reasons("not usable here", ((row.name, row.why_not) for row in shown))
    left_out = [row.name for row in rows if row.says_its_preset]
    if left_out and not options.all:
        print(f"\nand {len(left_out)} such as {left_out[0]}: `stratagem strategies --all`")
    print_failed_plugins(registry)
    # Usable strategies come first; without any usable strategy, the error of this command says
    # more.
    print(f"\nNext: stratagem explain --strategy {shown[0].name if shown else 'auto'}")
    return 0


def listed_strategies(registry: Registry, environ: Mapping[str, str]) -> list[ListedStrategy]:
    """Return all strategies sorted by distribution and name, including ambiguous names.

    Args:
        registry: the registry of plugins.
        environ: environment variables.
    """
    probe, environ = asked_once(), environ_of_machine(environ)
    accelerators = [each.spec for each in registry.candidates("accelerator")]
    candidates = registry.candidates("strategy")
    rows = []
    owners = dict.fromkeys(FIRST, "")  # ours come first
    for candidate in sorted(candidates, key=lambda c: owners.get(c.distribution, c.distribution)):
        spec = candidate.spec
        assert isinstance(spec, StrategySpec)
        takes = spec.capabilities.accelerators
        rows.append(
            ListedStrategy(
                name=selecting_name(registry, candidate, spec.name),
                aliases=tuple(selecting_name(registry, candidate, name) for name in spec.aliases),
                distribution=candidate.distribution,
                version=candidate.version,
                accelerators=takes,
                summary=spec.summary,
                why_not=_no_accelerator(takes, accelerators, probe)
                or why_not(candidate.qualified_name, registry, environ, probe),
                says_its_preset=says_its_preset(spec),
            )
        )
    return rows


def selecting_name(registry: Registry, candidate: Candidate, name: str) -> str:
    """Return a name of a component, qualified if the plain name would not select it."""
    try:
        found = registry.find(candidate.spec.kind, name)
    except ConfigurationError:
        found = None
    return name if found is candidate else f"{candidate.distribution}:{name}"


def _no_accelerator(
    names: tuple[str, ...] | None, accelerators: Sequence[ComponentSpec], probe: Probe
) -> str:
    """Return why no accelerator of a strategy is available here, or "".

    The error of a request would list all installed accelerators, which is long.

    Args:
        names: the accelerators that the strategy runs on; None for any.
        accelerators: all installed accelerators.
        probe: finds their devices.
    """
    reasons = []
    for spec in accelerators:
        if names is not None and not {spec.name, *spec.aliases}.isdisjoint(names):
            found = probe(spec)
            if found.free:
                return ""
            reasons.append(f"{spec.name} ({found.reason})")
    return "; ".join(reasons)
