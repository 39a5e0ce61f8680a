"""`stratagem doctor`: what is installed, what is wrong with it, and what this machine has."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from stratagem import __version__
from stratagem.cli.arguments import parser_of
from stratagem.cli.plugins import failed_commands, failed_hook
from stratagem.cli.system import System, this_system
from stratagem.cli.tables import aligned, print_table
from stratagem.discovery import AcceleratorSpec, Check, ClusterEnvironmentSpec, PrecisionSpec
from stratagem.discovery.entry_points import CORE, fits
from stratagem.discovery.hints import names_by_distribution
from stratagem.discovery.installed import version_of
from stratagem.discovery.loading import PluginReport
from stratagem.discovery.registry import RUN_TIME, Candidate, Registry, get_registry
from stratagem.errors import UnknownNameError
from stratagem.plan.cluster import CLUSTER_VARIABLE
from stratagem.plan.components import probe_accelerator
from stratagem_testing.author.spec_checks import check_spec

SUMMARY = "Show what is installed and what is wrong with it."

_DESCRIPTION = f"""{SUMMARY}

That is: versions, plugins, components, the machine, and what the plugins say of themselves. All of
it is read from metadata, files and drivers; neither torch nor an SDK is imported.

The exit code is 1 if a plugin is broken or incompatible, a name is ambiguous or a check failed.
A disabled plugin is not an error.

With the name of a distribution, or of its entry point, that one alone is examined, as its author
needs it: its metadata, what importing its plugin module costs, and each class, which is imported
with torch and compared with its spec. The exit code is 1 if something of it cannot work.
"""

SLOW_IMPORT = 0.2
"""Seconds above which a plugin module's import counts as slow: every program that uses Stratagem
pays it."""

KINDS = ("accelerator", "precision", "checkpoint_io", "cluster_environment", "launcher")
"""All but strategies, which have a command of their own."""


@dataclass(frozen=True)
class ListedComponent:
    """A component other than a strategy.

    Attributes:
        kind, name, distribution, version, summary: what it is and who provides it.
        here: what was found of it on this machine: an accelerator's devices, whether a cluster
            environment was detected, the libraries that a precision needs.
    """

    kind: str
    name: str
    distribution: str
    version: str
    summary: str
    here: str


@dataclass(frozen=True)
class Diagnosis:
    """All that was found.

    Attributes:
        versions: of Python, core, torch and each distribution with a plugin.
        system: the machine.
        plugins: what became of each plugin.
        ambiguous: (kind, name) and the qualified names of those who claim it.
        components: everything but strategies.
        missing: distributions that are known but not installed, and what they would provide.
        checks: what the plugins and this program examined: (plugin, check).
    """

    versions: Mapping[str, str]
    system: System
    plugins: tuple[PluginReport, ...]
    ambiguous: Mapping[tuple[str, str], tuple[str, ...]]
    components: tuple[ListedComponent, ...]
    missing: Mapping[str, tuple[str, ...]]
    checks: tuple[tuple[str, Check], ...]

    def problems(self) -> list[str]:
        """Return a line for each thing that needs a repair; a disabled plugin is none."""
        lines = [
            f"{report.distribution} ({report.entry_point}) is {report.status}: {report.reason}"
            for report in self.plugins
            if report.status in ("broken", "incompatible")
        ]
        lines += [
            f"{report.distribution} ({report.entry_point}): {note}"
            for report in self.plugins
            for note in report.notes
        ]
        lines += [
            f"the {kind} name {name!r} is ambiguous: choose one of {', '.join(holders)}"
            for (kind, name), holders in self.ambiguous.items()
        ]
        lines += [
            f"{plugin}: {check.name}: {check.detail}"
            for plugin, check in self.checks
            if check.status == "error"
        ]
        return lines


def run(arguments: Sequence[str]) -> int:
    """Examine everything and print what was found; return the exit code.

    Raises:
        SystemExit: the arguments are wrong (exit code 2), or ask for help.
    """
    parser = parser_of("doctor", _DESCRIPTION)
    parser.add_argument(
        "--verbose", action="store_true", help="show the tracebacks of broken plugins"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a distribution or plugin")
    options = parser.parse_args(arguments)
    if options.name is not None:
        return _examine_one(options.name, as_json=options.json, verbose=options.verbose)
    diagnosis = examine(get_registry(), os.environ)
    if options.json:
        import json

        print(json.dumps(as_data(diagnosis), indent=2))
    else:
        print_diagnosis(diagnosis, verbose=options.verbose)
    return int(bool(diagnosis.problems()))


def _examine_one(name: str, *, as_json: bool, verbose: bool) -> int:
    # Not above: what it needs takes longer to import than the rest of doctor.
    from stratagem_testing.author import doctor as distribution

    try:
        examination = distribution.examine_distribution(name, get_registry())
    except UnknownNameError as error:
        print(error, file=sys.stderr)
        return 2
    if as_json:
        import json

        print(json.dumps(distribution.as_data(examination), indent=2))
    else:
        distribution.print_examination(examination, verbose=verbose)
    return int(bool(examination.problems()))


def examine(registry: Registry, environ: Mapping[str, str]) -> Diagnosis:
    """Look at everything, and let every plugin look at itself.

    Args:
        registry: what there is.
        environ: environment variables.
    """
    distributions = {report.distribution: report.version for report in registry.reports}
    return Diagnosis(
        versions={
            "python": sys.version.partition(" ")[0],
            CORE: __version__,
            "torch": version_of("torch") or "not installed",
            **{name: version for name, version in distributions.items() if name != CORE},
        },
        system=this_system(),
        plugins=tuple(registry.reports),
        ambiguous={
            key: tuple(f"{holder.distribution}:{key[1]}" for holder in holders)
            for key, holders in registry.ambiguous().items()
        },
        components=tuple(
            listed_component(candidate, environ)
            for kind in KINDS
            for candidate in registry.candidates(kind)
        ),
        missing={
            name: provides
            for name, provides in names_by_distribution().items()
            if name not in distributions and version_of(name) is None
        },
        checks=(
            *failed_commands(registry),
            *_specs_checks(registry),
            *plugins_checks(registry),
        ),
    )


def listed_component(candidate: Candidate, environ: Mapping[str, str]) -> ListedComponent:
    """Return a component that is no strategy, with what was found of it on this machine."""
    spec = candidate.spec
    here = ""
    if isinstance(spec, AcceleratorSpec):
        found = probe_accelerator(spec)
        here = f"available: {found.reason}" if found.free else f"not available: {found.reason}"
    elif isinstance(spec, ClusterEnvironmentSpec):
        here = _detected(spec, environ)
    elif isinstance(spec, PrecisionSpec):
        here = "; ".join(map(_required, spec.requires))
    return ListedComponent(
        kind=spec.kind,
        name=spec.name,
        distribution=candidate.distribution,
        version=candidate.version,
        summary=spec.summary,
        here=here,
    )


def _detected(spec: ClusterEnvironmentSpec, environ: Mapping[str, str]) -> str:
    if environ.get(CLUSTER_VARIABLE, "").casefold() == spec.name.casefold():
        return f"chosen by {CLUSTER_VARIABLE}"
    if not spec.variables:
        return ""
    why_not = spec.why_not(environ)
    verb = "is" if len(spec.variables) == 1 else "are"
    return why_not or f"detected: {', '.join(spec.variables)} {verb} set"


def _required(text: str) -> str:
    """Return whether a distribution is there, in a version that a precision takes."""
    # By hand: importing `packaging` would take a fifth of all that doctor takes.
    name, clauses = re.findall(r"^([\w.-]+)(?:\[.*\])?\s*(.*)$", text)[0]
    version = version_of(name)
    if version is None:
        return f"not available: needs {text}, which is not installed"
    if not fits(clauses, version):
        return f"not available: needs {text}, and {version} is installed"
    return f"{name} {version}"


def _specs_checks(registry: Registry) -> list[tuple[str, Check]]:
    """Return what specs promise that is not there, and entry points that nobody reads."""
    checks = [
        (candidate.distribution, Check(f"{kind} {candidate.spec.name!r}", "error", problem))
        for kind in ("strategy", *KINDS)
        for candidate in registry.candidates(kind)
        if candidate.distribution not in (CORE, RUN_TIME)
        for problem in check_spec(candidate.spec, registry)
    ]
    checks += [("stratagem", Check("entry points", "error", text)) for text in registry.misplaced()]
    return checks


def plugins_checks(registry: Registry) -> list[tuple[str, Check]]:
    """Return what plugins say of themselves, by plugin."""
    checks: list[tuple[str, Check]] = []
    for implementation in registry.plugins.hook.stratagem_doctor.get_hookimpls():
        plugin = implementation.plugin_name
        # The boundary at which a backend that cannot examine itself is kept from the others.
        try:
            for check in cast(Iterable[object], implementation.function()):
                if not isinstance(check, Check):
                    raise TypeError(
                        f"stratagem_doctor() returned {check!r}; expected stratagem.discovery.Check"
                    )
                checks.append((plugin, check))
        except (Exception, SystemExit) as error:
            checks.append((plugin, failed_hook("stratagem_doctor", error)))
    return checks


def as_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as weights-only-safe data, for JSON."""
    return {
        "ok": not diagnosis.problems(),
        "problems": diagnosis.problems(),
        "versions": dict(diagnosis.versions),
        "system": asdict(diagnosis.system),
        "plugins": [
            {**asdict(report), "slow": report.seconds > SLOW_IMPORT} for report in diagnosis.plugins
        ],
        "ambiguous": [
            {"kind": kind, "name": name, "choices": list(holders)}
            for (kind, name), holders in diagnosis.ambiguous.items()
        ],
        "components": [asdict(component) for component in diagnosis.components],
        "not_installed": [
            {"distribution": name, "provides": list(provides)}
            for name, provides in diagnosis.missing.items()
        ],
        "checks": [{"plugin": plugin, **asdict(check)} for plugin, check in diagnosis.checks],
    }


def print_diagnosis(diagnosis: Diagnosis, *, verbose: bool) -> None:
    """Print a diagnosis, the problems last.

    Args:
        diagnosis: what was found.
        verbose: show the tracebacks of broken plugins.
    """
    _print_pairs("Versions", diagnosis.versions)
    _print_pairs("Machine", _machine(diagnosis.system))
    _print_section(
        "Plugins",
        ("distribution", "plugin", "status", "components", "import", "notes"),
        [_plugin_row(report) for report in diagnosis.plugins],
    )
    if verbose:
        for report in diagnosis.plugins:
            if report.detail:
                print(f"\n{report.distribution} ({report.entry_point}):\n{report.detail.rstrip()}")
    _print_section(
        "Names that several distributions claim",
        ("kind", "name", "choose one of"),
        [(kind, name, ", ".join(who)) for (kind, name), who in diagnosis.ambiguous.items()],
    )
    _print_section(
        "Components (strategies: see `stratagem strategies`)",
        ("kind", "name", "distribution", "here", "summary"),
        [
            (c.kind, c.name, f"{c.distribution} {c.version}", c.here, c.summary)
            for c in diagnosis.components
        ],
    )
    _print_section(
        "Not installed",
        ("distribution", "it would provide", "to install it"),
        [
            (name, ", ".join(provides), f"pip install {name}")
            for name, provides in diagnosis.missing.items()
        ],
    )
    _print_section(
        "Checks",
        ("plugin", "check", "status", "detail"),
        [(plugin, check.name, check.status, check.detail) for plugin, check in diagnosis.checks],
    )
    problems = diagnosis.problems()
    if not problems:
        print("\nNo problem found.")
        return
    print(f"\nProblems: {len(problems)}")
    for problem in problems:
        print(f"- {problem}")
    if not verbose and any(report.detail for report in diagnosis.plugins):
        print("`stratagem doctor --verbose` shows the tracebacks.")


def _machine(system: System) -> dict[str, str]:
    cores = f"{system.cores} available"
    if system.all_cores != system.cores:
        cores += f" of {system.all_cores}"
    memory = "unknown" if system.memory is None else f"{system.memory / 2**30:.1f} GiB"
    gpus = "; ".join(system.gpus) or "none found (only NVIDIA's are looked for)"
    return {"platform": system.platform, "cores": cores, "memory": memory, "GPUs": gpus}


def _plugin_row(report: PluginReport) -> tuple[str, ...]:
    status = f"{report.status} ({report.stage})" if report.stage else report.status
    seconds = f"{report.seconds:.3f} s"
    if report.seconds > SLOW_IMPORT:
        seconds += " (slow)"
    return (
        f"{report.distribution} {report.version}",
        f"{report.entry_point} = {report.value}",
        status,
        str(report.components),
        seconds,
        "; ".join(filter(None, (report.reason, *report.notes))),
    )


def _print_pairs(title: str, pairs: Mapping[str, str]) -> None:
    print(f"\n{title}")
    print(aligned(list(pairs.items())))


def _print_section(title: str, headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if rows:
        print(f"\n{title}")
        print_table(headers, rows)
