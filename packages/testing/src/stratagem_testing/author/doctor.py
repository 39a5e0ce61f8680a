"""`stratagem doctor NAME`: one distribution, for its author; what it describes is imported."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from stratagem.cli import (
    SLOW_IMPORT,
    failed_commands,
    listed_component,
    plugins_checks,
    print_table,
    why_not,
)
from stratagem.discovery import (
    CORE,
    GROUP,
    Candidate,
    Check,
    ComponentSpec,
    PluginEntry,
    PluginReport,
    Registry,
    StrategySpec,
    get_registry,
    installed_entries,
    load_target,
    misplaced_entries,
    names_by_distribution,
    nearest_of,
    normalise,
    version_of,
    why_not_lasting,
)
from stratagem.errors import UnknownNameError, format_text
from stratagem.plan import CLUSTER_VARIABLE, probe_accelerator
from stratagem_testing.author.former_names import former_names_in
from stratagem_testing.author.import_cost import import_alone
from stratagem_testing.author.private_imports import private_imports
from stratagem_testing.author.spec_checks import check_spec

_KINDS = (
    "strategy",
    "accelerator",
    "precision",
    "checkpoint_io",
    "cluster_environment",
    "launcher",
    "logger",
    "callback",
    "profiler",
    "name",
)
_FIRST_WORDS = re.compile(r"^stratagem-(backend-)?")


@dataclass(frozen=True)
class ExaminedComponent:
    """A component, and whether it can be used.

    Attributes:
        kind, name, target: the values of its spec.
        why_not: the reason why the component is unavailable on this machine, or "".
    """

    kind: str
    name: str
    target: str
    why_not: str


@dataclass(frozen=True)
class Examination:
    """The findings about one distribution.

    Attributes:
        distribution, version: the distribution.
        checks: the results of the checks; the status "error" means that a feature does not work.
        components: the components of the distribution.
        traces: the tracebacks of plugin modules that failed.
    """

    distribution: str
    version: str
    checks: tuple[Check, ...]
    components: tuple[ExaminedComponent, ...]
    traces: tuple[str, ...]

    def problems(self) -> list[str]:
        """Return a line for each problem that keeps a part of the distribution from working."""
        lines = [f"{c.name}: {c.detail}" for c in self.checks if c.status == "error"]
        if self.components and not lines and all(c.why_not for c in self.components):
            lines.append("nothing that it provides can be used on this machine")
        return [format_text(line, 2000) for line in lines]


def examine(name: str, *, as_json: bool, verbose: bool) -> int:
    """Print the examination of a distribution; return the exit code.

    Args:
        name: of the distribution, or of its entry point.
        as_json: print JSON.
        verbose: show the tracebacks of plugin modules that failed.
    """
    try:
        examination = examine_distribution(name, get_registry())
    except UnknownNameError as error:
        print(error, file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(as_data(examination), indent=2))
    else:
        print_examination(examination, verbose=verbose)
    return int(bool(examination.problems()))


def examine_distribution(name: str, registry: Registry) -> Examination:
    """Look at a distribution's metadata, import its modules, and compare them with its specs.

    Args:
        name: the name of the distribution, or of its entry point.
        registry: the installed components.

    Raises:
        UnknownNameError: no installed distribution has that name, or several plugins have it.
    """
    distribution = distribution_named(name, registry)
    entries = [entry for entry in installed_entries() if entry.distribution == distribution]
    reports = [report for report in registry.reports if report.distribution == distribution]
    components, checks = [], [*_metadata_checks(distribution, entries)]
    checks += _plugin_checks(reports, registry)
    checks += _import_checks(distribution, entries, registry)
    for kind in _KINDS:
        for candidate in registry.candidates(kind):
            if candidate.distribution == distribution:
                mistakes = _mistakes(candidate.spec, registry)
                components.append(_examined(candidate, registry, mistakes))
                checks += _component_checks(candidate.spec, mistakes)
    checks += [
        check
        for plugin, check in (*failed_commands(registry), *plugins_checks(registry))
        if plugin.partition(":")[0] == distribution
    ]
    return Examination(
        distribution=distribution,
        version=version_of(distribution) or "unknown",
        checks=tuple(checks),
        components=tuple(components),
        traces=tuple(report.detail for report in reports if report.detail),
    )


def distribution_named(name: str, registry: Registry) -> str:
    """Return the distribution for the name of a distribution or of its plugin.

    Raises:
        UnknownNameError: no distribution has that name, or several plugins have it.
    """
    wanted = normalise(name)
    distributions = dict.fromkeys(report.distribution for report in registry.reports)
    if wanted in distributions:
        return wanted
    by_entry = dict.fromkeys(
        report.distribution
        for report in registry.reports
        if normalise(report.entry_point) == wanted
    )
    if len(by_entry) > 1:
        raise UnknownNameError(
            f"{name!r} is the entry point of several distributions: name one of them, "
            f"{' or '.join(by_entry)}"
        )
    if by_entry:
        return next(iter(by_entry))
    # Last: an entry point often has the name of another library.
    if version_of(wanted) is not None:
        return wanted
    providers = dict.fromkeys(
        candidate.distribution
        for kind in _KINDS
        for candidate in registry.candidates(kind)
        if name.casefold() in (candidate.spec.name.casefold(), *candidate.spec.aliases)
    )
    known = [*distributions, *(report.entry_point for report in registry.reports)]
    # Without common first words, which make any two names alike.
    short = {_FIRST_WORDS.sub("", normalise(each)): each for each in reversed(known)}
    nearest = "" if providers else nearest_of(_FIRST_WORDS.sub("", wanted), list(short))
    raise UnknownNameError(
        f"no distribution or plugin {name!r} is installed"
        + (f" (did you mean {short[nearest]!r}?)" if nearest else "")
        + f": expected one of {', '.join(distributions)}"
        + (f"; {name!r} is provided by {', '.join(providers)}" if providers else "")
    )


# -- parts of the examination


def _metadata_checks(distribution: str, entries: list[PluginEntry]) -> Iterator[Check]:
    if distribution == CORE:
        return
    found = version_of(distribution) or ""
    yield Check("version", *_judge_version(found))
    for sentence in misplaced_entries():
        if sentence.startswith(f"{distribution} declares "):
            yield Check("entry points", "error", sentence)
    if not entries:
        yield Check(
            "entry points",
            "error",
            f"it declares none in the group {GROUP!r}: nothing of it is found; in pyproject.toml "
            f'that is [project.entry-points."{GROUP}"]',
        )
        return
    taken = {e.name: e.distribution for e in installed_entries() if e.distribution != distribution}
    for entry in entries:
        if entry.name in taken:
            yield Check(
                f"entry point {entry.name}",
                "warning",
                f"{taken[entry.name]} has one of the same name: STRATAGEM_DISABLE_PLUGINS would "
                "switch off both",
            )
        else:
            yield Check(f"entry point {entry.name}", "ok", f"{entry.value} in the group {GROUP}")
    yield Check("requirement on core", *_judge_requirement(entries[0].requires_core))
    yield from _judge_environment(distribution)


def _judge_version(version: str) -> tuple[Any, str]:
    from packaging.version import InvalidVersion, Version

    try:
        return "ok", str(Version(version))
    except InvalidVersion:
        return "error", f"'{version}' in its metadata is no version as PEP 440 has them: 0.1.0"


def _judge_requirement(clauses: str) -> tuple[Any, str]:
    """Return the status and detail of a requirement on core, such as "<0.2,>=0.1"."""
    why = why_not_lasting(clauses)
    return ("error", why) if why else ("ok", f"{CORE}{clauses}")


def _judge_environment(distribution: str) -> Iterator[Check]:
    """Yield what a distribution requires that is not here, as `pip check` does."""
    from importlib_metadata import PackageNotFoundError, requires
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        declared = requires(distribution) or []
    except PackageNotFoundError:
        return
    for text in declared:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            yield Check("requirements", "error", f"{text!r} in its metadata cannot be read")
            continue
        if normalise(wanted.name) == CORE:
            continue  # which has a line of its own
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = version_of(wanted.name)
        if found is None:
            yield Check("requirements", "error", f"{text} is not installed: pip install '{text}'")
        elif not wanted.specifier.contains(found, prereleases=True):
            yield Check(
                "requirements",
                "error",
                f"{text} is required, and {wanted.name} {found} is here: pip install '{text}'",
            )


def _plugin_checks(reports: list[PluginReport], registry: Registry) -> Iterator[Check]:
    for report in reports:
        what = f"plugin {report.entry_point}"
        if report.status != "loaded":
            unset = "; what it provides is unknown until then" * (report.status == "disabled")
            yield Check(what, "error", f"it is {report.status}: {report.reason}{unset}")
            continue
        for note in report.notes:
            yield Check(what, "error", note)
        if report.distribution != CORE and not any("imports torch" in n for n in report.notes):
            module = report.value.partition(":")[0].partition("[")[0].strip()
            yield Check(what, *_judge_import(module))
    for (kind, name), holders in registry.ambiguous().items():
        theirs = [holder.distribution for holder in holders]
        if reports and reports[0].distribution in theirs:
            yield Check(
                f"{kind} {name!r}",
                "error",
                f"{', '.join(theirs)} provide this name: users have to write "
                f"'{reports[0].distribution}:{name}'",
            )


def _judge_import(module: str) -> tuple[Any, str]:
    cost = import_alone(module, os.environ)
    if why := cost.why_not_light(module):
        return "error", why
    if cost.changed:
        return "warning", (
            f"importing {module} changes {', '.join(cost.changed)}: every program that uses "
            "Stratagem is changed by it"
        )
    seconds = cost.seconds
    for _ in range(2):  # the machine may have been busy, or its disk
        if seconds > SLOW_IMPORT:
            seconds = min(seconds, import_alone(module, os.environ).seconds)
    took = f"{module} takes {seconds:.3f} s to import"
    if seconds > SLOW_IMPORT:
        return "warning", f"{took}, which every program that uses Stratagem pays"
    return "ok", took


def _import_checks(
    distribution: str, entries: list[PluginEntry], registry: Registry
) -> Iterator[Check]:
    if distribution == CORE or distribution in names_by_distribution():
        return  # released together with its imports
    named = [entry.value for entry in entries] + [
        candidate.spec.target
        for kind in _KINDS
        for candidate in registry.candidates(kind)
        if candidate.distribution == distribution and isinstance(candidate.spec.target, str)
    ]
    for sentence in private_imports(named):
        yield Check("imports", "warning", sentence)
    for sentence in former_names_in(named):
        yield Check("former names", "error", sentence)


def _mistakes(spec: ComponentSpec, registry: Registry) -> list[str]:
    """Return what is wrong with a component, by its class and by what its spec names."""
    mistakes = _by_its_class("mistakes_of", spec)
    # An import finds the mistakes of the source, and more: report the common ones once.
    seen = [text for text in check_spec(spec, registry) if not mistakes or "it names " in text]
    return [*mistakes, *seen]


def _by_its_class(look: str, spec: ComponentSpec) -> list[str]:
    """Return what a function of `component_checks` says of a component."""
    # Output of an import must not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        # By name: the program does without torch, and this cannot.
        function: Callable[[ComponentSpec], list[str]] = load_target(
            f"stratagem_testing.author.component_checks:{look}", what="doctor's checks of classes"
        )
        return function(spec)


def _component_checks(spec: ComponentSpec, mistakes: list[str]) -> Iterator[Check]:
    what = f"{spec.kind} {spec.name!r}"
    for mistake in mistakes:
        yield Check(what, "error", mistake)
    doubts = [] if mistakes else _by_its_class("doubts_of", spec)
    for doubt in doubts:
        yield Check(what, "warning", doubt)
    if not mistakes and not doubts:
        yield Check(what, "ok", f"{spec.target} is there and agrees with its spec")


def _examined(candidate: Candidate, registry: Registry, mistakes: list[str]) -> ExaminedComponent:
    spec = candidate.spec
    if mistakes:
        reason = mistakes[0]
    elif isinstance(spec, StrategySpec):
        # About this machine, not about the cluster job in which this program may run.
        environ = {**os.environ, CLUSTER_VARIABLE: "none"}
        reason = why_not(candidate.qualified_name, registry, environ, probe_accelerator)
    else:
        reason = listed_component(candidate, os.environ).here.partition("not available: ")[2]
    return ExaminedComponent(spec.kind, spec.name, str(spec.target), reason)


# -- output


def as_data(examination: Examination) -> dict[str, Any]:
    """Return an examination as weights-only-safe data, for JSON."""
    problems = examination.problems()
    return {"ok": not problems, "problems": problems, **asdict(examination)}


def print_examination(examination: Examination, *, verbose: bool) -> None:
    """Print an examination, the problems last.

    Args:
        examination: the findings.
        verbose: show the tracebacks of plugin modules that failed.
    """
    print(f"{examination.distribution} {examination.version}\n")
    print_table(
        ("check", "status", "detail"), [(c.name, c.status, c.detail) for c in examination.checks]
    )
    if examination.components:
        print()
        print_table(
            ("kind", "name", "usable here"),
            [
                (c.kind, c.name, f"no: {c.why_not}" if c.why_not else "yes")
                for c in examination.components
            ],
        )
    if verbose:
        for trace in examination.traces:
            print(f"\n{format_text(trace.rstrip(), 20_000, lines=True)}")
    problems = examination.problems()
    if not problems:
        left_out = [component.name for component in examination.components if component.why_not]
        but = f"; on this machine {', '.join(left_out)} cannot be used" if left_out else ""
        number = sum(check.status == "warning" for check in examination.checks)
        warned = f"; {number} warning{'s' * (number > 1)} above" if number else ""
        print(f"\nNo problem found{but}{warned}.")
        return
    print(f"\nProblems: {len(problems)}")
    for problem in problems:
        print(f"- {problem}")
    if examination.traces and not verbose:
        print("`--verbose` shows the tracebacks.")
