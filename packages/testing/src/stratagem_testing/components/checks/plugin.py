"""Plugins: the module of a distribution's entry point, and what its specs promise."""

from __future__ import annotations

import json
import sys

from stratagem.discovery import (
    CORE,
    DISABLE_VARIABLE,
    FIRST,
    PLUGIN_API_VERSION,
    AcceleratorSpec,
    ComponentSpec,
    PluginEntry,
    Registry,
    get_registry,
    installed_entries,
    load_target,
    normalise,
    why_not_lasting,
)
from stratagem.errors import PluginError
from stratagem_testing.author.component_checks import interface_of, kinds, mistakes_of
from stratagem_testing.author.import_cost import import_alone
from stratagem_testing.author.spec_checks import check_spec
from stratagem_testing.components.bench import Bench
from stratagem_testing.components.check import check
from stratagem_testing.processes import clean_environment

KIND = "plugin"
KINDS = kinds()
_LONGEST = 120
"""Characters of a summary, which is a line of a table."""
_LIST = """
import json, sys
from stratagem_testing.author.import_cost import import_alone
from stratagem.discovery import Registry
registry = Registry.discover()
kinds = json.loads(sys.argv[1])
found = [c.spec.name for kind in kinds for c in registry.candidates(kind)
         if c.distribution == sys.argv[2]]
status = [r.status for r in registry.reports if r.distribution == sys.argv[2]]
print(json.dumps({"found": found, "status": status, "imported": sys.argv[3] in sys.modules}))
"""


def _entries(bench: Bench) -> list[PluginEntry]:
    """Return the distribution's entry points."""
    wanted = normalise(bench.component.name)
    found = [entry for entry in installed_entries() if entry.distribution == wanted]
    assert found, (
        f"no installed distribution {bench.component.name!r} declares an entry point in the group "
        f"'stratagem.backends': {'; '.join(get_registry().misplaced()) or 'install it first'}"
    )
    return found


def _registry(bench: Bench) -> Registry:
    """Return what there is, once the plugin was loaded."""
    _entries(bench)
    registry = get_registry()
    for report in registry.reports:
        if report.distribution == normalise(bench.component.name):
            assert report.status == "loaded", (
                f"the plugin {report.entry_point!r} is {report.status}: {report.reason}"
            )
    return registry


def _specs(bench: Bench) -> list[ComponentSpec]:
    """Return the distribution's specs."""
    registry = _registry(bench)
    return [
        candidate.spec
        for kind in KINDS
        for candidate in registry.candidates(kind)
        if candidate.distribution == normalise(bench.component.name)
    ]


def _called(spec: ComponentSpec) -> str:
    return f"the {spec.kind} {spec.name!r}"


@check(KIND, "import/light", slow=True)
def _light(bench: Bench) -> None:
    """The module imports neither torch nor a vendor's library, in at most `cpu_seconds`.

    Nor do the modules of the functions that specs name, which run while a request is resolved:
    `probe`, `incompatible_because` and `local_world_size`.
    """
    limit = bench.option("cpu_seconds")
    targets = [spec.target for spec in _specs(bench)]
    for entry in _entries(bench):
        module = entry.value.partition(":")[0]
        environ = clean_environment(bench.component.search_path)
        costs = [import_alone(module, environ) for _ in range(2)]
        assert not (why := costs[0].why_not_light(module, targets)), why
        seconds = min(cost.cpu_seconds for cost in costs)
        assert seconds <= limit, (
            f"importing the plugin module {module} takes {seconds:.3f} s of processor time, "
            f"expected at most {limit}: every program that uses Stratagem pays it"
        )
    for module in sorted(_modules_of_functions(bench)):
        cost = import_alone(module, clean_environment(bench.component.search_path))
        assert not (why := cost.why_not_light(module)), (
            f"a function that a spec names runs while a request is resolved, and {why}"
        )


def _modules_of_functions(bench: Bench) -> set[str]:
    """Return the modules of the functions that the distribution's specs name."""
    named = [
        getattr(spec, field, None)
        for spec in _specs(bench)
        for field in ("probe", "incompatible_because", "local_world_size")
    ]
    return {each.partition(":")[0] for each in named if isinstance(each, str)}


@check(KIND, "import/no side effects", slow=True)
def _side_effects(bench: Bench) -> None:
    """Importing the module prints nothing, and has no other side effect.

    It changes no environment variable, signal handler, path, thread or file.
    """
    for entry in _entries(bench):
        module = entry.value.partition(":")[0]
        environ = clean_environment(bench.component.search_path)
        cost = import_alone(module, environ, folder=str(bench.folder))
        assert not cost.error, f"importing {module} alone fails: {cost.error}"
        assert not cost.changed, (
            f"importing the plugin module {module} changes {'; '.join(cost.changed)}: every "
            "program that uses Stratagem is changed by it"
        )
        assert not bench.files(), f"importing {module} wrote {', '.join(bench.files())}"


@check(KIND, "metadata/requirement on core")
def _requirement(bench: Bench) -> None:
    """The distribution requires a range of core that excludes the next minor version."""
    for entry in _entries(bench):
        if entry.distribution == CORE:
            continue
        assert not (why := why_not_lasting(entry.requires_core)), why


@check(KIND, "metadata/disabled by name", slow=True)
def _disabled(bench: Bench) -> None:
    """STRATAGEM_DISABLE_PLUGINS disables it.

    Then its names are unknown, and its module is not imported.
    """
    for entry in _entries(bench):
        if entry.distribution == CORE:
            continue  # without it nothing runs
        module = entry.value.partition(":")[0]
        done = bench.python(
            *("-c", _LIST, json.dumps(KINDS), entry.distribution, module),
            environ={DISABLE_VARIABLE: entry.distribution},
        )
        assert done.returncode == 0, f"discovery fails where it is disabled: {done.stderr[-1500:]}"
        told = json.loads(done.stdout.strip().splitlines()[-1])
        assert set(told["status"]) == {"disabled"}, (
            f"with {DISABLE_VARIABLE}={entry.distribution} it is {', '.join(told['status'])}"
        )
        assert not told["found"], f"although it is disabled, {', '.join(told['found'])} are there"
        assert not told["imported"], f"although it is disabled, {module} was imported"


@check(KIND, "specs/targets")
def _targets(bench: Bench) -> None:
    """Each spec's target can be imported.

    It is a class of the spec's kind, or returns an object of one.
    """
    specs = _specs(bench)
    assert specs, f"{bench.component.name} provides no component: see stratagem_components()"
    for spec in specs:
        try:
            target = spec.load()
        except PluginError as error:
            raise AssertionError(
                f"{_called(spec)}: {error}. Import an SDK where it is used, and say in an error "
                "what to install"
            ) from None
        expected = interface_of(spec)
        assert callable(target), f"{_called(spec)} has the target {target!r}, which makes nothing"
        assert not isinstance(target, type) or issubclass(target, expected), (
            f"{_called(spec)} has the target {spec.target!r}, which is no {expected.__name__}"
        )


@check(KIND, "specs/names")
def _names(bench: Bench) -> None:
    """No name or alias belongs to another distribution.

    Accelerators can share an alias like "gpu".
    """
    registry = _registry(bench)
    own = normalise(bench.component.name)
    taken = {
        (kind, name.casefold()): candidate.distribution
        for kind in KINDS
        for candidate in registry.candidates(kind)
        if candidate.distribution != own
        for name in (candidate.spec.name, *candidate.spec.aliases)
    }
    for spec in _specs(bench):
        for name in (spec.name, *spec.aliases):
            shared = registry.sharing(spec.kind, name)
            other = None if shared else taken.get((spec.kind, name.casefold()))
            assert other is None, (
                f"{_called(spec)} claims the name {name!r} of {other}"
                + (": its names are reserved" if other in FIRST else "")
                + "; choose one that begins with your distribution's name"
            )


@check(KIND, "specs/summary and version")
def _summary(bench: Bench) -> None:
    """Each spec has a summary of one line, and the installed version of the plugin API."""
    for spec in _specs(bench):
        assert spec.summary.strip(), (
            f"{_called(spec)} has no summary, which `stratagem strategies` and `doctor` show"
        )
        assert "\n" not in spec.summary and len(spec.summary) <= _LONGEST, (  # noqa: PT018
            f"{_called(spec)} has a summary of {len(spec.summary)} characters; expected one line "
            f"of at most {_LONGEST}"
        )
        assert spec.api_version <= PLUGIN_API_VERSION, (
            f"{_called(spec)} was made for plugin API version {spec.api_version}, and this is "
            f"{PLUGIN_API_VERSION}"
        )


@check(KIND, "specs/as the class")
def _as_the_class(bench: Bench) -> None:
    """A spec agrees with its class.

    The class can be instantiated, and its methods have the signatures of the base class.
    """
    for spec in _specs(bench):
        problems = mistakes_of(spec)
        assert not problems, f"{_called(spec)}: {'; '.join(problems)}"


@check(KIND, "specs/what they name")
def _named(bench: Bench) -> None:
    """The launchers, checkpoint formats and probes that specs name exist."""
    registry = _registry(bench)
    for spec in _specs(bench):
        problems = list(check_spec(spec, registry))
        assert not problems, f"{_called(spec)}: {'; '.join(problems)}"
        if isinstance(spec, AcceleratorSpec):
            probe = load_target(spec.probe, what="the probe")
            assert probe().reason, f"{_called(spec)} has a probe that gives no reason"


@check(KIND, "specs/doctor")
def _doctor(bench: Bench) -> None:
    """`stratagem doctor` finds no mistake in it."""
    own = normalise(bench.component.name)
    registry = _registry(bench)
    notes = [
        note
        for report in registry.reports
        if report.distribution == own
        for note in report.notes
        # The kit has imported torch before.
        if "imports torch" not in note or "torch" not in sys.modules
    ]
    notes += [text for text in registry.misplaced() if text.startswith(own)]
    assert not notes, f"`stratagem doctor` says: {'; '.join(notes)}"
