"""`stratagem doctor`: check the installation, and list the hardware of this machine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stratagem import __version__
from stratagem.cli import (
    ambiguous_names,
    ask_plugins,
    failed_commands,
    misplaced_checks,
    parser_of,
    plugins_checks,
    print_reasons,
    print_table,
    problems_of,
)
from stratagem.discovery import (
    CORE,
    FIRST,
    RUN_TIME,
    AcceleratorSpec,
    Candidate,
    Check,
    ClusterEnvironmentSpec,
    PluginReport,
    PrecisionSpec,
    Registry,
    fits,
    get_registry,
    gpus,
    names_by_distribution,
    version_of,
)
from stratagem.errors import format_text
from stratagem.launch import available_cores, host_memory
from stratagem.plan import CLUSTER_VARIABLE, probe_accelerator


@dataclass(frozen=True)
class System:
    """This machine, as this process sees it.

    Attributes:
        platform: the operating system and its version.
        cores: the number of cores that this process may use.
        all_cores: the number of cores of the machine.
        memory: the bytes that this process may use: the machine's memory or the limit of its
            control group (of a container or job), whichever is less; None if unknown.
        gpus: a line for each GPU of NVIDIA, AMD, Intel or Apple, even if no installed distribution
            trains on it.
    """

    platform: str
    cores: int
    all_cores: int
    memory: int | None
    gpus: tuple[str, ...]


def this_system() -> System:
    """Return the description of this machine."""
    return System(
        platform=_platform(),
        cores=available_cores(),
        all_cores=os.cpu_count() or 1,
        memory=host_memory(),
        gpus=tuple(gpus()),
    )


def _platform() -> str:
    """Return `platform.platform()`, without starting a program as that function does."""
    if sys.platform != "linux":
        import platform

        return platform.platform()
    host = os.uname()
    libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").replace(" ", "")
    return f"{host.sysname}-{host.release}-{host.machine}" + (f"-with-{libc}" if libc else "")


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
"""The time in seconds above which a plugin module's import counts as slow, since it delays every
program that uses Stratagem."""

KINDS = (
    *("accelerator", "precision", "checkpoint_io", "cluster_environment", "launcher"),
    *("logger", "callback", "profiler", "name"),
)
"""All kinds except strategies, which have their own command."""


@dataclass(frozen=True)
class ListedComponent:
    """A component other than a strategy.

    Attributes:
        kind, name, distribution, version, summary: the component and its distribution.
        here: its state on this machine: an accelerator's devices, whether a cluster
            environment was detected, the libraries that a precision needs.
    """

    kind: str
    name: str
    distribution: str
    version: str
    summary: str
    here: str

    @property
    def why_not(self) -> str:
        """The reason why it cannot be used here; empty if it can."""
        return self.here.partition(": ")[2] if self.here.startswith("not ") else ""


@dataclass(frozen=True)
class Diagnosis:
    """The results of `stratagem doctor`.

    Attributes:
        versions: the versions of Python, core, torch and each distribution with a plugin.
        system: the machine.
        plugins: the status of each plugin.
        ambiguous: for each ambiguous (kind, name), the qualified names that claim it.
        components: all components except strategies.
        missing: distributions that are known but not installed, with the components they provide.
        checks: the checks of the plugins and of this program, as (plugin, check).
    """

    versions: Mapping[str, str]
    system: System
    plugins: tuple[PluginReport, ...]
    ambiguous: Mapping[tuple[str, str], tuple[str, ...]]
    components: tuple[ListedComponent, ...]
    missing: Mapping[str, tuple[str, ...]]
    checks: tuple[tuple[str, Check], ...]

    def problems(self) -> list[str]:
        """Return a line for each problem; a disabled plugin is not a problem."""
        return problems_of(self.plugins, self.ambiguous, self.checks)


def doctor(arguments: Sequence[str]) -> int:
    """Examine the installation and print the results; return the exit code.

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
    code: int | None = get_registry().plugins.hook.stratagem_examine(
        distribution=name, as_json=as_json, verbose=verbose
    )
    if code is None:
        print(
            f"stratagem doctor {name}: no plugin that is installed examines a single distribution: "
            "pip install stratagem-testing",
            file=sys.stderr,
        )
        return 2
    return code


def examine(registry: Registry, environ: Mapping[str, str]) -> Diagnosis:
    """Examine the installation, including each plugin's own checks.

    Args:
        registry: the registry of plugins.
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
        ambiguous=ambiguous_names(registry),
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
        checks=(*failed_commands(registry), *_specs_checks(registry), *plugins_checks(registry)),
    )


def listed_component(candidate: Candidate, environ: Mapping[str, str]) -> ListedComponent:
    """Return a component other than a strategy, with its state on this machine."""
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
    if why_not := spec.why_not(environ):
        return f"not detected: {why_not}"
    verb = "is" if len(spec.variables) == 1 else "are"
    return f"detected: {', '.join(spec.variables)} {verb} set"


def _required(text: str) -> str:
    """Return whether a distribution is installed, in a version that a precision accepts."""
    # Parsed by hand: importing `packaging` would take a fifth of doctor's time.
    name, clauses = re.findall(r"^([\w.-]+)(?:\[.*\])?\s*(.*)$", text)[0]
    version = version_of(name)
    if version is None:
        return f"not available: needs {text}, which is not installed"
    if not fits(clauses, version):
        return f"not available: needs {text}, and {version} is installed"
    return f"{name} {version}"


def _specs_checks(registry: Registry) -> list[tuple[str, Check]]:
    """Return the problems that plugins find in specs, and entry points in unknown groups."""
    checks: dict[tuple[str, Check], None] = {}  # a hook that fails does so for each spec
    for kind in ("strategy", *KINDS):
        for candidate in registry.candidates(kind):
            spec = candidate.spec
            if candidate.distribution in (*FIRST, RUN_TIME):
                continue
            for plugin, found in ask_plugins(registry, "stratagem_check_spec", str, spec=spec):
                if isinstance(found, Check):
                    checks[plugin, found] = None
                else:
                    check = Check(f"{kind} {spec.name!r}", "error", found)
                    checks[candidate.distribution, check] = None
    return [*checks, *misplaced_checks(registry)]


def as_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as weights-only-safe data, for JSON."""
    return {
        "ok": not diagnosis.problems(),
        "problems": diagnosis.problems(),
        "versions": dict(diagnosis.versions),
        "system": asdict(diagnosis.system),
        "plugins": [{**asdict(r), "slow": r.seconds > SLOW_IMPORT} for r in diagnosis.plugins],
        "ambiguous": [
            {"kind": kind, "name": name, "choices": list(holders)}
            for (kind, name), holders in diagnosis.ambiguous.items()
        ],
        "components": [asdict(component) for component in diagnosis.components],
        "not_installed": [
            {"distribution": name, "provides": list(what)}
            for name, what in diagnosis.missing.items()
        ],
        "checks": [{"plugin": plugin, **asdict(check)} for plugin, check in diagnosis.checks],
    }


def print_diagnosis(diagnosis: Diagnosis, *, verbose: bool) -> None:
    """Print a diagnosis, the problems last.

    Args:
        diagnosis: the results.
        verbose: whether to show the tracebacks of broken plugins.
    """
    _print_section(("installed", "version"), list(diagnosis.versions.items()))
    _print_section(("machine", ""), list(_machine(diagnosis.system).items()))
    _print_section(
        ("plugin", "status", "components", "import", "notes"),
        [_plugin_row(report) for report in diagnosis.plugins],
    )
    if verbose:
        for report in diagnosis.plugins:
            if report.detail:
                shown = format_text(report.detail.rstrip(), 20_000, lines=True)
                print(f"\n{report.distribution} ({report.entry_point}):\n{shown}")
    _print_section(
        ("ambiguous name", "kind", "choose one of"),
        [(name, kind, ", ".join(who)) for (kind, name), who in diagnosis.ambiguous.items()],
    )
    names: dict[str, tuple[list[str], list[str]]] = {kind: ([], []) for kind in KINDS}
    for each in diagnosis.components:
        names[each.kind][bool(each.why_not)].append(each.name)
    del names["name"]  # import names say little here, and are long
    _print_section(
        ("components", "usable here", "not usable here"),
        [(kind, ", ".join(yes), ", ".join(no)) for kind, (yes, no) in names.items()],
    )
    print_reasons("not usable here", ((c.name, c.why_not) for c in diagnosis.components))
    _print_section(
        ("not installed", "it would provide", "to install it"),
        [
            (name, ", ".join(provides), f"pip install {name}")
            for name, provides in diagnosis.missing.items()
        ],
    )
    _print_section(
        ("check", "status", "detail"),
        [
            (f"{plugin.partition(':')[0]}: {c.name}", c.status, c.detail)
            for plugin, c in diagnosis.checks
        ],
    )
    problems = diagnosis.problems()
    print(f"\nProblems: {len(problems)}" if problems else "\nNo problem found.")
    for problem in problems:
        print(f"- {problem}")
    traced = not verbose and any(report.detail for report in diagnosis.plugins)
    print(f"\nNext: stratagem {'doctor --verbose  # with tracebacks' if traced else 'strategies'}")


def _machine(system: System) -> dict[str, str]:
    cores = f"{system.cores} available"
    if system.all_cores != system.cores:
        cores += f" of {system.all_cores}"
    memory = "unknown" if system.memory is None else f"{system.memory / 2**30:.1f} GiB"
    return {
        "platform": system.platform,
        "cores": cores,
        "memory": memory,
        "GPUs": "; ".join(system.gpus) or "none found",
        "sockets": "127.0.0.1 in a run on one node: other users of this machine can connect to it "
        "(SECURITY.md)",
    }


def _plugin_row(report: PluginReport) -> tuple[str, ...]:
    status = f"{report.status} ({report.stage})" if report.stage else report.status
    seconds = f"{report.seconds:.3f} s"
    if report.seconds > SLOW_IMPORT:
        seconds += " (slow)"
    return (
        f"{report.distribution} {report.version}",
        status,
        str(report.components),
        seconds,
        "; ".join(filter(None, (report.reason, *report.notes))),
    )


def _print_section(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if rows:
        print()
        print_table(headers, rows)
