"""The registry: it loads plugins, and finds each component by kind and name."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import pluggy

from stratagem import __version__
from stratagem.discovery import hookspecs
from stratagem.discovery.capabilities import Capabilities
from stratagem.discovery.entry_points import (
    CORE,
    DISABLE_VARIABLE,
    FIRST,
    PluginEntry,
    installed_entries,
    misplaced_entries,
    normalise,
    why_disabled,
    why_incompatible,
)
from stratagem.discovery.hints import distribution_of, installation_hint
from stratagem.discovery.specs import PLUGIN_API_VERSION, ComponentSpec, StrategySpec
from stratagem.errors import (
    AmbiguousNameError,
    ConfigurationError,
    PluginError,
    StratagemError,
    UnknownNameError,
    format_text,
)

Key = tuple[str, str]
"""A kind, and a name in lower case."""

_MEANT = {"fp16": "16-mixed", "float16": "16-true", "half": "16-true", "fp32": "32-true"}
"""Names of precisions in other libraries, and their names in Stratagem."""
_LONGEST = 100
"""The most characters of a plugin's return value in a message."""
_MOST_COMPONENTS = 10_000
"""The most components of a plugin, because its generator may be endless."""


def announce_nothing(plugin: str) -> None:
    """Ignore the plugin that is about to run."""


announce: Callable[[str], None] = announce_nothing
"""Called with a plugin before its code runs, and with "" after that. The program replaces it."""


@dataclass(frozen=True)
class PluginReport:
    """The result of loading an entry point.

    Attributes:
        distribution, version, entry_point, value: the identity of the entry point.
        status: "loaded", "disabled", "incompatible" or "broken".
        stage: the stage that failed: "environment", "metadata", "import", "hooks" or "specs"; "":
            no stage failed.
        reason: why the entry point is not loaded, in one line; "" for a loaded entry point.
        detail: the traceback, for a broken entry point.
        seconds: how long the import took.
        components: number of components that it provides.
        notes: mistakes of its author that do not prevent loading, such as claiming a reserved name.
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
    """Load an entry point; return a report and the specs that it provides.

    Args:
        entry: the entry point to load.
        environ: the environment, with the variables that disable plugins.
        plugins: the manager in which its hooks are registered, unless loading fails.
        claimed: the names that its distribution has already claimed.
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
    # A plugin's failure is isolated here: any exception but Ctrl-C's (an SDK may raise OSError or
    # even call sys.exit) becomes a part of its report, and discovery goes on.
    stage, began = "import", time.perf_counter()
    try:
        plugin = entry.load()
        report = replace(report, seconds=time.perf_counter() - began)
        stage = "hooks"
        _register_hooks(plugin, name, plugins, entry.value)
        stage = "specs"
        specs = _specs_of(plugin, plugins)
        _refuse_repeated_names(specs, entry.distribution, claimed)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        import traceback  # which takes as long to import as all plugins, and is seldom needed

        plugins.unregister(name=name)
        broken = replace(
            report,
            status="broken",
            stage=stage,
            reason=format_text(" ".join(f"{type(error).__name__}: {error}".split()), 1000),
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
            specs.extend(itertools.islice(returned, _MOST_COMPONENTS + 1))
            if len(specs) > _MOST_COMPONENTS:
                raise PluginError(
                    f"stratagem_components() returned more than {_MOST_COMPONENTS} components; "
                    "expected an iterable that ends"
                )
    for spec in specs:
        if not isinstance(spec, ComponentSpec):
            raise PluginError(
                f"stratagem_components() returned {_shortly(spec)} among its specs; expected "
                "ComponentSpec objects such as StrategySpec"
            )
    return specs


def _shortly(found: object) -> str:
    """Return a plugin's return value for a message; a spec is shortened to its kind and name."""
    if isinstance(found, ComponentSpec):
        return f"the {found.kind} spec {found.name!r}"
    return format_text(repr(found), _LONGEST)


def _refuse_repeated_names(
    specs: Iterable[ComponentSpec], distribution: str, claimed: Collection[Key]
) -> None:
    """Raise an error if a distribution claims a name twice: its qualified name is not unique."""
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
    """Return an error message for a spec of a later version of the plugin API; "": no such spec.

    A spec of an earlier version is accepted: a class that has a former name is refused when it is
    bound, and a spec that has one is refused when it is created.
    """
    for spec in specs:
        if not 1 <= spec.api_version <= PLUGIN_API_VERSION:
            return (
                f"its {spec.kind} {spec.name!r} was made for plugin API version "
                f"{spec.api_version}, but {CORE} {__version__} has the versions 1 to "
                f"{PLUGIN_API_VERSION}: pip install --upgrade "
                f"{CORE if spec.api_version > PLUGIN_API_VERSION else distribution}, or install a "
                f"release of {distribution} made for version {PLUGIN_API_VERSION}; "
                "docs/extend/plugin-api.md lists what has changed"
            )
    return ""


RUN_TIME = "registered-in-this-process"
"""Used as the distribution of components that code registers at run time."""


@dataclass(frozen=True)
class Candidate:
    """A component that a name may refer to: its spec, its distribution and their version."""

    spec: ComponentSpec
    distribution: str
    version: str

    @property
    def qualified_name(self) -> str:
        """`"distribution:name"`, which is never ambiguous."""
        return f"{self.distribution}:{self.spec.name}"


def says_its_preset(spec: ComponentSpec) -> bool:
    """Whether a component's name ends with a preset argument, so that listings can omit it.

    Example:
        >>> from stratagem.discovery import StrategySpec
        >>> from stratagem.discovery.registry import says_its_preset
        >>> says_its_preset(StrategySpec(
        ...     name="ddp_static_graph_true", target="m:DDP", api_version=2,
        ...     init_args={"static_graph": True},
        ... ))
        True
    """
    return any(
        spec.name.endswith(f"_{argument}_{str(value).lower()}")
        for argument, value in spec.init_args.items()
    )


class Registry:
    """Components by kind and name.

    1. `Registry.discover()` reads entry points, once per process (see `get_registry`).
    2. `find(kind, name)` returns the matching candidate, or raises an error with a remedy.
    3. `add` and `remove` change the registry at run time.

    Each process has its own registry.
    """

    def __init__(self) -> None:
        self.plugins = pluggy.PluginManager(hookspecs.PROJECT)
        self.plugins.add_hookspecs(hookspecs)
        self.reports: list[PluginReport] = []
        self._candidates: dict[tuple[str, str], list[Candidate]] = {}
        self._claimed: dict[str, set[tuple[str, str]]] = {}
        self._misplaced: Callable[[], list[str]] = list

    @classmethod
    def discover(
        cls, entries: Iterable[PluginEntry] | None = None, environ: Mapping[str, str] | None = None
    ) -> Registry:
        """Load every plugin that is installed, enabled and compatible; report on all plugins.

        Args:
            entries: the entry points to load; None: all installed entry points.
            environ: the environment, with the variables that disable plugins; None: `os.environ`.
        """
        registry = cls()
        environ = os.environ if environ is None else environ
        if entries is None:
            entries, registry._misplaced = installed_entries(), misplaced_entries
        # Core first, so that its names are reserved before anybody else claims them.
        last = len(FIRST)
        order = {name: place for place, name in enumerate(FIRST)}
        for entry in sorted(entries, key=lambda entry: order.get(entry.distribution, last)):
            registry.reports.append(registry._load(entry, environ))
        return registry

    def _load(self, entry: PluginEntry, environ: Mapping[str, str]) -> PluginReport:
        claimed = self._claimed.get(entry.distribution, set())
        announce(f"{entry.distribution} ({entry.name})")
        report, specs = load_plugin(entry, environ, self.plugins, claimed)
        announce("")
        notes = [
            f"the {spec.kind} name {name!r} is reserved for {owner}: reach this one as "
            f"{entry.distribution}:{name}"
            for spec in specs
            for name, owner in self._put(Candidate(spec, entry.distribution, entry.version))
        ]
        return replace(report, notes=(*report.notes, *notes))

    def _put(self, candidate: Candidate) -> Iterator[tuple[str, str]]:
        """Store a candidate under its names; yield each reserved name and its owner."""
        claimed = self._claimed.setdefault(candidate.distribution, set())
        for name in (candidate.spec.name, *candidate.spec.aliases):
            key = (candidate.spec.kind, name.casefold())
            claimed.add(key)
            holders = self._candidates.setdefault(key, [])
            holders.append(candidate)
            owner = holders[0].distribution
            if owner in FIRST and owner != candidate.distribution:
                yield name, owner

    def call_hook(self, hook: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """Call a hook of each plugin, the last registered first; yield the plugin and its answer.

        Raises:
            PluginError: a plugin raised an exception other than a StratagemError; names the plugin.
        """
        for implementation in reversed(getattr(self.plugins.hook, hook).get_hookimpls()):
            taken = (arguments[name] for name in implementation.argnames)
            try:
                answer = implementation.function(*taken)
            except StratagemError:
                raise
            except Exception as error:
                raise PluginError(
                    f"the plugin {implementation.plugin_name} failed in {hook} with "
                    f"{type(error).__name__}: {format_text(str(error), 1000)}: disable it with "
                    f"{DISABLE_VARIABLE}"
                ) from error
            yield implementation.plugin_name, answer

    def find(self, kind: str, name: str) -> Candidate:
        """Return the component with a name.

        Args:
            kind: "strategy", "accelerator", "precision", "checkpoint_io", "cluster_environment",
                "launcher", "logger", "callback" or "profiler".
            name: a name, an alias, or the qualified form `"distribution:name"`.

        Raises:
            UnknownNameError: no component has that name. The message has the nearest name, a failed
                plugin that might have provided it, the package to install, and the available names.
            AmbiguousNameError: several distributions claim the name; lists the qualified names.
        """
        distribution, _, plain = name.rpartition(":")
        holders = self._candidates.get((kind, plain.casefold()), [])
        if distribution:
            holders = [h for h in holders if h.distribution == normalise(distribution)]
        if not holders:
            raise UnknownNameError(self._unknown(kind, name))
        if holders[0].distribution in (RUN_TIME, *FIRST) or len(holders) == 1:
            return holders[0]
        raise AmbiguousNameError(
            f"the {kind.replace('_', ' ')} {name!r} is provided by {len(holders)} distributions; "
            "choose one by its qualified name: "
            + ", ".join(repr(f"{holder.distribution}:{plain}") for holder in holders)
        )

    def has(self, kind: str, name: str) -> bool:
        """Return whether a component has a name, an alias, or a qualified form; see `find`."""
        return (kind, name.rpartition(":")[2].casefold()) in self._candidates

    def _unknown(self, kind: str, name: str) -> str:
        qualifier, _, plain = name.rpartition(":")
        what, provider = f"{kind.replace('_', ' ')} {name!r}", distribution_of(plain, kind)
        providers, hint = self.possible_providers(plain, kind), installation_hint(plain, kind)
        parts, near = [f"unknown {what}."], ""
        if holders := self._candidates.get((kind, plain.casefold())):
            others = ", ".join(repr(f"{holder.distribution}:{plain}") for holder in holders)
            parts.append(f"{qualifier!r} provides none of that name; there is {others}.")
        elif provider is not None and hint in providers:  # not installed
            parts, providers = [installation_hint(plain, kind, what)], providers[1:]
        else:
            meant = _MEANT if kind == "precision" else {}
            bare = plain.casefold().partition("(")[0]  # "mesh" of "mesh(tensor=2)"
            near = nearest_of(bare, self.names(kind)) or meant.get(bare, "")
        if near:
            parts.append(f"Did you mean {near!r}?")
            if self.has(kind, near) and self._owner(kind, near) == provider:
                providers = []  # installed, and has the nearest name
        parts += providers
        if kind == "accelerator" and not hint:
            parts.append(
                "If torch has a device of that name, pass "
                f"accelerator=DeviceAccelerator({plain!r}) (from stratagem.accelerators)."
            )
        if near and kind == "strategy":
            way = "A name takes no arguments: pass an instance of its class."
            parts.append(way if "(" in name else "`stratagem strategies` lists all that there are.")
        else:
            specs = [candidate.spec for candidate in self.candidates(kind)]
            shown = sorted({spec.name for spec in specs if not says_its_preset(spec)})
            parts.append(f"Installed: {', '.join(shown) or 'none'}.")
        return " ".join(parts)

    def _owner(self, kind: str, name: str) -> str:
        return self._candidates[kind, name.casefold()][0].distribution

    def shadowed(self, candidate: Candidate, name: str) -> list[str]:
        """Return the qualified names of the components that a reserved name hides."""
        if candidate.distribution not in FIRST or ":" in name:
            return []
        holders = self._candidates.get((candidate.spec.kind, name.casefold()), [])
        return [
            f"{h.distribution}:{name}" for h in holders if h.distribution not in (*FIRST, RUN_TIME)
        ]

    def misplaced(self) -> list[str]:
        """Return a sentence for each installed entry point in a group with a misspelled name."""
        return self._misplaced()

    def possible_providers(self, name: str, kind: str | None = None) -> list[str]:
        """Return sentences about distributions that might provide a missing name.

        If plugins that are not loaded might provide the name, return a sentence for each. Otherwise
        name the distribution to upgrade or to install. If the distribution is unknown, return a
        sentence for each plugin that failed. Misspelled groups of entry points are added.

        Args:
            name: the name of a component or a command, or an import name.
            kind: as in `distribution_of`.
        """
        provider = distribution_of(name, kind)
        suspects = [
            f"{report.distribution} {report.version} might provide it but is {report.status}: "
            f"{report.reason}."
            for report in self.reports
            if report.status != "loaded"
            and (report.distribution == provider or _related(name, report))
        ]
        if suspects:
            return suspects
        if held := [report.version for report in self.reports if report.distribution == provider]:
            return [
                f"{provider} {held[0]} is installed and provides no such name; if a later release "
                f"does: pip install --upgrade {provider}."
            ]
        failed = [
            f"{report.distribution} {report.version} is {report.status}, and nothing that it "
            f"provides is known: {report.reason}."
            for report in self.reports
            if report.status in ("broken", "incompatible")
        ]
        return [*([hint] if (hint := installation_hint(name, kind)) else failed), *self.misplaced()]

    def names(self, kind: str) -> list[str]:
        """Return the names of a kind's components, without aliases, sorted."""
        return sorted({c.spec.name for c in self.candidates(kind)})

    def candidates(self, kind: str) -> list[Candidate]:
        """Return a kind's components, sorted by name; an ambiguous name has several components."""
        found: dict[tuple[str, str], Candidate] = {}
        for (its_kind, name), holders in self._candidates.items():
            if its_kind == kind:
                for holder in holders:
                    # Skip aliases. If two were registered in this process, take the latest, which
                    # comes first.
                    if holder.spec.name.casefold() == name:
                        found.setdefault((holder.spec.name, holder.distribution), holder)
        return [found[key] for key in sorted(found)]

    def provider_of(self, target: str) -> str | None:
        """Return the distribution that declares a spec with this target.

        None: no spec has this target.
        """
        candidates = (c for holders in self._candidates.values() for c in holders)
        return next((c.distribution for c in candidates if c.spec.target == target), None)

    def ambiguous(self) -> dict[tuple[str, str], list[Candidate]]:
        """Return the unreserved names (kind, name) that several distributions claim.

        An alias that accelerators share, such as "gpu", stands for the one that is present.
        """
        return {
            key: holders
            for key, holders in sorted(self._candidates.items())
            if len(holders) > 1
            and holders[0].distribution not in (RUN_TIME, *FIRST)
            and not self.sharing(*key)
        }

    def sharing(self, kind: str, alias: str) -> list[Candidate]:
        """Return the accelerators that share an alias; []: another kind, or one accelerator."""
        holders = self._candidates.get((kind, alias.casefold()), [])
        names = {holder.spec.name.casefold() for holder in holders}
        own = len(holders) < 2 or alias.casefold() in names or holders[0].distribution == RUN_TIME
        return [] if own or kind != "accelerator" else holders

    def registered(self) -> list[ComponentSpec]:
        """Return the specs registered at run time in this process, the earliest first."""
        specs: list[ComponentSpec] = []
        for holders in self._candidates.values():
            for holder in reversed(holders):
                if holder.distribution == RUN_TIME and holder.spec not in specs:
                    specs.append(holder.spec)
        return specs

    def add(self, spec: ComponentSpec, *, override: bool = False) -> None:
        """Register a component for this process.

        Raises:
            ConfigurationError: a name of the component is taken and `override` is False.
        """
        keys = [(spec.kind, name.casefold()) for name in (spec.name, *spec.aliases)]
        for key in keys:
            holders = self._candidates.get(key)
            if holders and not override:
                raise ConfigurationError(
                    f"the {spec.kind} name {key[1]!r} is taken by {holders[0].distribution}; "
                    "choose another name, or pass override=True to replace it in this process"
                )
        candidate = Candidate(spec, RUN_TIME, __version__)
        for key in keys:
            self._candidates[key] = [candidate, *self._candidates.get(key, [])]

    def remove(self, kind: str, name: str) -> None:
        """Remove a component that `add` registered; a component that it replaced is restored.

        Raises:
            UnknownNameError: no component was registered under that name in this process.
        """
        holders = self._candidates.get((kind, name.casefold()), [])
        if not holders or holders[0].distribution != RUN_TIME:
            raise UnknownNameError(
                f"the {kind} {name!r} was not registered in this process, so it cannot be removed; "
                "an installed plugin is switched off with STRATAGEM_DISABLE_PLUGINS"
            )
        spec = holders[0].spec
        for its_name in (spec.name, *spec.aliases):
            its_key = (kind, its_name.casefold())
            left = [h for h in self._candidates[its_key] if h.spec is not spec]
            if left:
                self._candidates[its_key] = left
            else:
                del self._candidates[its_key]


def _related(name: str, report: PluginReport) -> bool:
    """Whether a plugin's names share a word with the wanted name."""
    words = set(name.casefold().replace("-", "_").split("_")) - {"strategy", "stage"}
    theirs = f"{report.distribution}_{report.entry_point}_{report.value}".casefold()
    return bool(words & set(theirs.replace("-", "_").replace(".", "_").split("_")))


_registry: Registry | None = None
_lock = threading.RLock()


def get_registry() -> Registry:
    """Return this process's registry; the first call discovers the installed plugins."""
    global _registry
    if _registry is None:
        with _lock:
            if _registry is None:
                _registry = Registry.discover()
    return _registry


def nearest_of(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the known name nearest to a misspelled name, or "".

    Among names that are about as near, the one with the most similar length is chosen: letters are
    changed or swapped more often than left out.

    Args:
        name: the misspelled name.
        known: the names to choose from.
        cutoff: the least ratio of similar letters; 0.9 is a difference of a letter or two.
    """
    import difflib  # which a listing of names does without

    near = difflib.get_close_matches(name, list(known), n=5, cutoff=cutoff)
    ratios = {one: difflib.SequenceMatcher(None, one, name).ratio() for one in near}
    best = max(ratios.values(), default=0.0)
    among = [one for one in near if ratios[one] > best - 0.15]
    return min(among, key=lambda one: abs(len(one) - len(name)), default="")


class _StrategyRegistry:
    """Strategies by name, for code that registers them at run time.

    Example:
        >>> from stratagem import StrategyRegistry
        >>> from stratagem.strategies import DDPStrategy
        >>> StrategyRegistry.register("ddp_static", DDPStrategy, description="DDP, static graph",
        ...                           static_graph=True)
        >>> "ddp_static" in StrategyRegistry.available_strategies()
        True
        >>> StrategyRegistry.remove("ddp_static")
    """

    def register(
        self,
        name: str,
        strategy: type[Any],
        *,
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> None:
        """Register a strategy: `Trainer(strategy=name)` uses `strategy(**init_params)`.

        The registration holds in this process.

        Args:
            name: the name to select it by.
            strategy: a Strategy class.
            description: one line for listings.
            override: replace the strategy that has this name.
            **init_params: keyword arguments of the class.

        Raises:
            ConfigurationError: the name is taken and `override` is False; or `strategy` is not a
                Strategy class.
        """
        capabilities = getattr(strategy, "capabilities", None)
        if not isinstance(strategy, type) or not isinstance(capabilities, Capabilities):
            raise ConfigurationError(
                f"StrategyRegistry.register({name!r}, ...) expected a subclass of "
                f"stratagem.strategies.Strategy, received {strategy!r}"
            )
        get_registry().add(
            StrategySpec(
                name=name,
                target=strategy,
                api_version=PLUGIN_API_VERSION,
                summary=description or (strategy.__doc__ or "").strip().partition("\n")[0],
                init_args=init_params,
                capabilities=capabilities,
            ),
            override=override,
        )

    def get(self, name: str) -> Any:
        """Return a new instance of a strategy, with its preset arguments.

        Raises:
            UnknownNameError: no strategy has that name.
        """
        return get_registry().find("strategy", name).spec.build()

    def __getitem__(self, name: str) -> dict[str, Any]:
        """Return a strategy's entry: "strategy" (the class), "init_params" and "description".

        Raises:
            UnknownNameError: no strategy has that name.
        """
        spec = get_registry().find("strategy", name).spec
        return {
            "strategy": spec.load(),
            "strategy_name": spec.name,
            "description": spec.summary,
            "init_params": dict(spec.init_args),
        }

    def remove(self, name: str) -> None:
        """Remove a strategy that was registered here; a strategy that it replaced is restored."""
        get_registry().remove("strategy", name)

    def available_strategies(self) -> list[str]:
        """Return the names of all strategies, discovered and registered, sorted."""
        return get_registry().names("strategy")

    def __contains__(self, name: object) -> bool:
        return name in self.available_strategies()

    def __iter__(self) -> Iterator[str]:
        return iter(self.available_strategies())


StrategyRegistry = _StrategyRegistry()
"""Strategies by name; see `register`, `get`, `remove` and `available_strategies`.
`StrategyRegistry["ddp"]` is the entry of a strategy."""
