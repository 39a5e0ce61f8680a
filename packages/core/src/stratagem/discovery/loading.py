"""Loading one plugin: its module, its hooks, its specs; whatever fails becomes its report."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import pluggy

from stratagem import __version__
from stratagem.discovery import hookspecs
from stratagem.discovery.entry_points import CORE, PluginEntry, why_disabled, why_incompatible
from stratagem.discovery.specs import PLUGIN_API_VERSION, ComponentSpec
from stratagem.errors import PluginError

Key = tuple[str, str]
"""A kind, and a name in lower case."""

_LONGEST = 100
"""Characters of what a plugin has returned, in a message."""


@dataclass(frozen=True)
class PluginReport:
    """What became of one entry point.

    Attributes:
        distribution, version, entry_point, value: where it stands.
        status: "loaded", "disabled", "incompatible" or "broken".
        stage: where it stopped: "environment", "metadata", "import", "hooks" or "specs".
        reason: why it is not loaded, in one line; empty if it is.
        detail: the traceback, for a broken one.
        seconds: how long importing it took.
        components: how many components it provides.
        notes: its author's mistakes that do not stop it, such as a reserved name that it claims.
    """

    distribution: str
    version: str
    entry_point: str
    value: str
    status: Literal["loaded", "disabled", "incompatible", "broken"]
    stage: str = ""
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0
    components: int = 0
    notes: tuple[str, ...] = ()


def load_plugin(
    entry: PluginEntry,
    environ: Mapping[str, str],
    plugins: pluggy.PluginManager,
    claimed: Collection[Key],
) -> tuple[PluginReport, list[ComponentSpec]]:
    """Return what became of an entry point, and the specs that it provides.

    Args:
        entry: what to load.
        environ: where the variables that disable plugins are read.
        plugins: its hooks are registered here, unless it fails.
        claimed: the names that its distribution has claimed already.
    """
    report = PluginReport(
        entry.distribution, entry.version, entry.name, entry.value, status="loaded"
    )
    if reason := why_disabled(entry, environ):
        return replace(report, status="disabled", stage="environment", reason=reason), []
    if reason := why_incompatible(entry, __version__):
        return replace(report, status="incompatible", stage="metadata", reason=reason), []

    name = f"{entry.distribution}:{entry.name}"
    had_torch = "torch" in sys.modules
    # The boundary at which a plugin's failure is isolated: whatever it raises (an SDK may raise
    # OSError or even call sys.exit) becomes its report, and discovery goes on.
    stage, began = "import", time.perf_counter()
    try:
        plugin = entry.load()
        report = replace(report, seconds=time.perf_counter() - began)
        stage = "hooks"
        _register_hooks(plugin, name, plugins, entry.value)
        stage = "specs"
        specs = _specs_of(plugin, plugins)
        _refuse_repeated_names(specs, entry.distribution, claimed)
    except (Exception, SystemExit) as error:
        import traceback  # which takes as long to import as all plugins, and is seldom needed

        plugins.unregister(name=name)
        broken = replace(
            report,
            status="broken",
            stage=stage,
            reason=f"{type(error).__name__}: {error}".strip().replace("\n", " "),
            detail="".join(traceback.format_exception(error)),
            seconds=time.perf_counter() - began,
        )
        return broken, []

    if reason := _why_other_api(specs, entry.distribution):
        plugins.unregister(name=name)
        return replace(report, status="incompatible", stage="specs", reason=reason), []
    notes: tuple[str, ...] = ()
    if not had_torch and "torch" in sys.modules:
        notes = (
            f"{entry.value} imports torch ({report.seconds:.1f} s), which every program that uses "
            "Stratagem pays: import it in the modules that the specs' targets name",
        )
    return replace(report, components=len(specs), notes=notes), specs


def _register_hooks(plugin: object, name: str, plugins: pluggy.PluginManager, value: str) -> None:
    plugins.register(plugin, name=name)
    callers = plugins.get_hookcallers(plugin)
    if not callers:
        module, _, attribute = value.partition("[")[0].partition(":")
        of_object = (
            f"; its entry point names {attribute.strip()!r} in the module {module.strip()}: where "
            "the hooks are functions of a module, name that alone"
        )
        raise PluginError(
            "it implements no hook; expected functions decorated with stratagem.discovery.hookimpl"
            + of_object * bool(attribute)
        )
    for caller in callers:
        if not caller.has_spec():
            raise PluginError(
                f"it implements {caller.name!r}, which is not a hook of Stratagem; hooks are "
                + ", ".join(n for n in dir(hookspecs) if n.startswith("stratagem_"))
            )


def _specs_of(plugin: object, plugins: pluggy.PluginManager) -> list[ComponentSpec]:
    specs: list[ComponentSpec] = []
    for implementation in plugins.hook.stratagem_components.get_hookimpls():
        if implementation.plugin is plugin:
            returned: Any = implementation.function()
            if not isinstance(returned, Iterable):
                raise PluginError(
                    f"stratagem_components() returned {_shortly(returned)}; expected an iterable "
                    "of ComponentSpec objects: yield each of them"
                )
            specs.extend(returned)
    for spec in specs:
        if not isinstance(spec, ComponentSpec):
            raise PluginError(
                f"stratagem_components() returned {_shortly(spec)} among its specs; expected "
                "ComponentSpec objects such as StrategySpec"
            )
    return specs


def _shortly(found: object) -> str:
    """Return what a plugin has returned, for a message: of a spec only whose it is."""
    if isinstance(found, ComponentSpec):
        return f"the {found.kind} spec {found.name!r}"
    text = repr(found)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _refuse_repeated_names(
    specs: Iterable[ComponentSpec], distribution: str, claimed: Collection[Key]
) -> None:
    """Refuse a name that a distribution claims twice: no qualified form would be unique."""
    seen = set(claimed)
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            key = (spec.kind, name.casefold())
            if key in seen:
                raise PluginError(
                    f"{distribution} provides the {spec.kind} name {name!r} twice; expected "
                    "each name and alias once in a distribution"
                )
            seen.add(key)


def _why_other_api(specs: Iterable[ComponentSpec], distribution: str) -> str:
    """Return which spec was made for another version of the plugin API; "": none."""
    for spec in specs:
        if spec.api_version != PLUGIN_API_VERSION:
            remedy = f"install a release of {distribution} made for version {PLUGIN_API_VERSION}"
            if spec.api_version > PLUGIN_API_VERSION:
                remedy = f"pip install --upgrade {CORE}, or {remedy}"
            return (
                f"its {spec.kind} {spec.name!r} was made for plugin API version "
                f"{spec.api_version}, but {CORE} {__version__} has version "
                f"{PLUGIN_API_VERSION}: {remedy}"
            )
    return ""
