"""From what the user asked for to what will run: `resolve(RunRequest, Registry) -> RunPlan`.

A pure function over specs: it imports no torch, starts nothing, and reads the environment from the
request. Every wrong combination is refused here, before a process starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stratagem.discovery.capabilities import START_METHODS, Capabilities
from stratagem.discovery.registry import Candidate, Registry
from stratagem.discovery.specs import (
    AcceleratorSpec,
    Availability,
    ClusterEnvironmentSpec,
    LauncherSpec,
    PrecisionSpec,
    StrategySpec,
    load_target,
)
from stratagem.errors import ConfigurationError, UnknownNameError
from stratagem.plan.devices import is_index, is_zero, parse_devices
from stratagem.plan.plan import RunPlan, RunRequest, Selection

CLUSTER_VARIABLE = "STRATAGEM_CLUSTER"
"""Names the cluster environment; "none" switches detection off."""

PLAIN = "plain"
ASYNC = "async"
_GIVEN = "given as an object"


def resolve(
    request: RunRequest,
    registry: Registry,
    *,
    probe: Callable[[Any], Availability] | None = None,
) -> RunPlan:
    """Choose every component that the request leaves open and check that they fit together.

    Args:
        request: what the user asked for.
        registry: what there is.
        probe: returns what an accelerator (its spec, or an object) finds on this machine; None
            asks the accelerator itself.

    Raises:
        ConfigurationError: the request cannot be met; says what was expected, what was received
            and what to do.
    """
    return _Resolver(request, registry, probe or probe_accelerator).plan()


class _Resolver:
    """The decisions in the order in which they depend on one another."""

    def __init__(
        self, request: RunRequest, registry: Registry, probe: Callable[[Any], Availability]
    ) -> None:
        self.request = request
        self.registry = registry
        self.probe = probe
        self.environments_passed_over: tuple[Selection, ...] = ()
        self.not_started_by = ""
        """Why the environment that was chosen, by name, has not started this process."""

    def plan(self) -> RunPlan:
        named = self._named_strategy()
        wanted = _capabilities(named) if named else None
        self.preset = _preset_parts(named) if named else {}
        request = self.request
        environment, external = self._cluster_environment()
        accelerator, availability = self._accelerator(wanted)
        devices, devices_why = self._devices(
            accelerator, availability, wanted, environment, external
        )
        strategy = named or self._auto_strategy(accelerator, devices, environment, external)
        self.preset = _preset_parts(strategy)
        capabilities = _capabilities(strategy)

        num_nodes = self._num_nodes(len(devices), environment, external, capabilities)
        self._check_strategy(strategy, capabilities, accelerator, devices, num_nodes)
        self._check_world(strategy, capabilities, devices, num_nodes, environment, external)
        plan = RunPlan(
            request=request,
            accelerator=accelerator,
            devices=devices,
            devices_why=devices_why,
            strategy=strategy,
            capabilities=capabilities,
            precision=self._precision(strategy, capabilities, accelerator),
            cluster_environment=environment,
            launcher=self._launcher(strategy, capabilities, environment, external),
            checkpoint_io=self._written_behind(self._checkpoint_io(capabilities)),
            num_nodes=num_nodes,
            environments_passed_over=self.environments_passed_over,
        )
        self.registry.plugins.hook.stratagem_run_planned(plan=plan)
        return plan

    # -- strategy

    def _named_strategy(self) -> Selection | None:
        wanted = self.request.strategy
        if wanted is None or wanted == "auto":
            return None
        if isinstance(wanted, str):
            return self._find("strategy", wanted, "you named it")
        capabilities = getattr(wanted, "capabilities", None)
        if isinstance(wanted, type) or not isinstance(capabilities, Capabilities):
            raise ConfigurationError(
                f"strategy={wanted!r}: expected a name or an instance of "
                "stratagem.strategies.Strategy with the class attribute capabilities"
                + (", received a class: call it" if isinstance(wanted, type) else "")
            )
        return Selection("strategy", type(wanted).__name__, _GIVEN, "you passed it", wanted)

    def _auto_strategy(
        self,
        accelerator: Selection,
        devices: tuple[int, ...],
        environment: Selection,
        external: bool,
    ) -> Selection:
        request = self.request
        several = len(devices) > 1 or request.num_nodes > 1
        if external and (self._number(environment, "world_size") or 1) > 1:
            several = True
        fitting = tuple(
            dict.fromkeys(  # a name that two distributions claim stands there once
                candidate.spec.name
                for candidate in self.registry.candidates("strategy")
                if isinstance(candidate.spec, StrategySpec)
                and _takes(candidate.spec.capabilities.accelerators, accelerator)
                and (candidate.spec.capabilities.many_devices or not several)
            )
        )
        for implementation in reversed(
            self.registry.plugins.hook.stratagem_choose_strategy.get_hookimpls()
        ):
            arguments = {"request": request, "candidates": fitting}
            answer = implementation.function(*(arguments[name] for name in implementation.argnames))
            if answer is None:
                continue
            plugin = implementation.plugin_name
            if answer not in fitting:
                raise ConfigurationError(
                    f"the plugin {plugin} chose the strategy {answer!r} for this request; expected "
                    f"one of {_either(fitting)}: name a strategy, or disable the plugin with "
                    "STRATAGEM_DISABLE_PLUGINS"
                )
            return self._find("strategy", answer, f"chosen by the plugin {plugin}")
        if several:
            why = f"{len(devices)} device(s) a node and no strategy named"
            if request.interactive and not external and "ddp_notebook" in fitting:
                return self._find("strategy", "ddp_notebook", f"{why}, in a notebook")
            return self._find("strategy", "ddp", why)
        return self._find("strategy", "single_device", "one device and no strategy named")

    def _check_strategy(
        self,
        strategy: Selection,
        capabilities: Capabilities,
        accelerator: Selection,
        devices: tuple[int, ...],
        num_nodes: int,
    ) -> None:
        if not _takes(capabilities.accelerators, accelerator):
            raise ConfigurationError(
                f"the strategy {strategy.name!r} runs on "
                f"{_either(capabilities.accelerators)}, received accelerator={accelerator.name!r}: "
                "change one of the two"
            )
        if len(devices) > 1 and not capabilities.many_devices:
            raise ConfigurationError(
                f"the strategy {strategy.name!r} uses one device, received devices="
                f"{self.request.devices!r} ({len(devices)} devices): pass devices=1, or a strategy "
                "for several devices such as 'ddp'"
            )
        if num_nodes > 1 and not capabilities.multi_node:
            raise ConfigurationError(
                f"the strategy {strategy.name!r} runs on one node, received num_nodes={num_nodes}: "
                "pass num_nodes=1, or a strategy for several nodes such as 'ddp'"
            )

    # -- accelerator and devices

    def _accelerator(self, wanted: Capabilities | None) -> tuple[Selection, Availability]:
        asked = self._asked("accelerator", "auto")
        if not isinstance(asked, str):
            name = getattr(asked, "name", None)
            if not isinstance(name, str) or isinstance(asked, type):
                raise ConfigurationError(
                    f"accelerator={asked!r}: expected a name or an instance of "
                    "stratagem.accelerators.Accelerator"
                )
            selected = Selection("accelerator", name, _GIVEN, "you passed it", asked)
            return selected, self._available(selected)
        if asked != "auto":
            selected = self._find("accelerator", asked, "you named it")
            return selected, self._available(selected)
        if self.request.devices is None or is_zero(self.request.devices):
            selected = self._find("accelerator", "cpu", f"devices={self.request.devices!r}")
            return selected, self._available(selected)
        return self._best_accelerator(wanted)

    def _best_accelerator(self, wanted: Capabilities | None) -> tuple[Selection, Availability]:
        accelerators = [
            candidate
            for candidate in self.registry.candidates("accelerator")
            if isinstance(candidate.spec, AcceleratorSpec)
        ]
        accelerators.sort(key=lambda c: getattr(c.spec, "priority", 0), reverse=True)
        refused = []
        for candidate in accelerators:
            selected = _selection(candidate, "")
            if wanted is not None and not _takes(wanted.accelerators, selected):
                refused.append(f"{candidate.spec.name} (not for this strategy)")
                continue
            found = self.probe(candidate.spec)
            if found.count:
                why = f"the best that is available here ({found.reason})"
                return _selection(candidate, why), found
            refused.append(f"{candidate.spec.name} ({found.reason})")
        raise ConfigurationError(
            "no accelerator is available for this request: "
            + ("; ".join(refused) or "none is known")
            + ". Name another strategy, or run where there is one (`stratagem doctor` lists them)"
        )

    def _available(self, selected: Selection) -> Availability:
        found = self.probe(selected.source)
        if not found.count:
            raise ConfigurationError(
                f"accelerator={selected.name!r} is not available on this machine: {found.reason}; "
                "pass accelerator='auto' to take what there is"
            )
        return found

    def _devices(
        self,
        accelerator: Selection,
        found: Availability,
        wanted: Capabilities | None,
        environment: Selection,
        external: bool,
    ) -> tuple[tuple[int, ...], str]:
        asked = self.request.devices
        if is_zero(asked) and found.indexed:
            raise ConfigurationError(
                f"devices=0 leaves nothing to train on with accelerator={accelerator.name!r}: pass "
                "a number of devices, or accelerator='cpu'"
            )
        if asked is None or asked == "auto" or is_zero(asked):
            local = self._number(environment, "local_world_size") if external else None
            if external and local is None:
                world = self._number(environment, "world_size")
                local = world // self.request.num_nodes if world else None
            if wanted is not None and not wanted.many_devices:
                return (0,), f"the strategy uses one {accelerator.name} device"
            if local and not (wanted is not None and wanted.one_process):
                return tuple(range(local)), f"as {environment.name} says"
            count = found.count if found.auto_count is None else found.auto_count
            return tuple(range(count)), f"automatic for {accelerator.name}: {found.reason}"
        indices = parse_devices(asked, found, accelerator.name)
        if found.indexed and max(indices) >= found.count:
            raise ConfigurationError(
                f"devices={asked!r} asks for {accelerator.name} device {max(indices)}, but there "
                f"are {found.count} here ({found.reason}), counted from 0"
            )
        return indices, "you asked for it"

    # -- cluster and nodes

    def _cluster_environment(self) -> tuple[Selection, bool]:
        """Return the environment, and whether it has started this process as one of its ranks."""
        environ = self.request.environ
        asked = self._asked("cluster_environment", None)
        if asked is not None and not isinstance(asked, str):
            _check_object(
                "cluster_environment",
                asked,
                "creates_processes_externally",
                "stratagem.environments.ClusterEnvironment",
            )
            external = bool(asked.creates_processes_externally)
            name = type(asked).__name__
            return Selection("cluster_environment", name, _GIVEN, "you passed it", asked), external
        if asked is not None:
            selected = self._find("cluster_environment", asked, "you named it")
            return selected, self._is_external(selected)
        switch = environ.get(CLUSTER_VARIABLE, "")
        if switch.casefold() == "none":
            why = f"detection is switched off by {CLUSTER_VARIABLE}=none"
            return self._find("cluster_environment", PLAIN, why), False
        if switch:
            try:
                selected = self._find("cluster_environment", switch, f"{CLUSTER_VARIABLE}={switch}")
            except UnknownNameError as error:
                raise UnknownNameError(f"{CLUSTER_VARIABLE}={switch}: {error}") from None
            return selected, self._is_external(selected)
        return self._detected_environment()

    def _detected_environment(self) -> tuple[Selection, bool]:
        """Return the detected environment, and keep why each of the others was passed over."""
        detected: Candidate | None = None
        candidates = [
            candidate
            for candidate in self.registry.candidates("cluster_environment")
            if isinstance(candidate.spec, ClusterEnvironmentSpec) and candidate.spec.variables
        ]
        candidates.sort(key=lambda c: getattr(c.spec, "priority", 0), reverse=True)
        passed_over = []
        for candidate in candidates:
            assert isinstance(candidate.spec, ClusterEnvironmentSpec)
            why_not = candidate.spec.why_not(self.request.environ)
            if not why_not and detected is not None:
                why_not = f"{detected.spec.name} goes before it"
            if why_not:
                passed_over.append(_selection(candidate, why_not))
            else:
                detected = candidate
        self.environments_passed_over = tuple(passed_over)
        if detected is None:
            selected = self._find("cluster_environment", PLAIN, "no cluster was detected")
            return selected, self._is_external(selected)
        assert isinstance(detected.spec, ClusterEnvironmentSpec)
        variables = detected.spec.variables
        verb = "is" if len(variables) == 1 else "are"
        selected = _selection(detected, f"{', '.join(variables)} {verb} set")
        return selected, self._is_external(selected)

    def _is_external(self, selected: Selection) -> bool:
        """Whether an environment has started this process as one of its ranks."""
        spec, environ = selected.spec, self.request.environ
        assert isinstance(spec, ClusterEnvironmentSpec)
        self.not_started_by = spec.why_not(environ)
        return not self.not_started_by and spec.local_rank_variable in environ

    def _number(self, environment: Selection, what: str) -> int | None:
        """Return the environment's world_size, local_world_size or rank, if it says one."""
        spec = environment.spec
        if not isinstance(spec, ClusterEnvironmentSpec):
            method = getattr(environment.source, "global_rank" if what == "rank" else what)
            return int(method())
        if what == "local_world_size" and spec.local_world_size is not None:
            function = load_target(spec.local_world_size, what=f"local_world_size of {spec.name!r}")
            return int(function(self.request.environ))
        variable = str(getattr(spec, f"{what}_variable"))
        text = self.request.environ.get(variable)
        if text is None:
            return None
        if not text.strip().isdigit():
            raise ConfigurationError(
                f"the cluster environment {environment.name!r} expects a number in {variable}, "
                f"received {variable}={text!r}"
            )
        return int(text)

    def _num_nodes(
        self, local: int, environment: Selection, external: bool, capabilities: Capabilities
    ) -> int:
        asked = self.request.num_nodes
        if not is_index(asked) or asked < 1:
            raise ConfigurationError(f"num_nodes={asked!r}: expected a whole number of at least 1")
        if asked > 1 and not external and environment.name == PLAIN:
            missing = [
                variable
                for variable in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
                if variable not in self.request.environ
            ]
            if missing:
                raise ConfigurationError(
                    f"num_nodes={asked} needs a cluster, and none was detected: start the script "
                    "with torchrun or a cluster's launcher, or set MASTER_ADDR, MASTER_PORT and "
                    f"NODE_RANK on each node (not set: {', '.join(missing)})"
                )
        if asked == 1 and external and not capabilities.one_process:
            world = self._number(environment, "world_size") or local
            its_local = self._number(environment, "local_world_size") or local
            return max(1, world // its_local)
        return asked

    def _check_world(
        self,
        strategy: Selection,
        capabilities: Capabilities,
        devices: tuple[int, ...],
        num_nodes: int,
        environment: Selection,
        external: bool,
    ) -> None:
        if not external:
            several = not capabilities.one_process and (len(devices) > 1 or num_nodes > 1)
            if several and self.not_started_by:
                raise ConfigurationError(
                    f"the cluster environment {environment.name!r} ({environment.why}) has not "
                    f"started this process: {self.not_started_by}. Start one process for each of "
                    f"the {len(devices) * num_nodes} ranks with the cluster's launcher, or name no "
                    "cluster environment, to let the strategy start them"
                )
            return
        world = self._number(environment, "world_size") or 1
        if capabilities.one_process:
            rank = self._number(environment, "rank") or 0
            if world > 1 and rank > 0 and not capabilities.multi_node:
                raise ConfigurationError(
                    f"this process is rank {rank} of {world} ({environment.name}), but the "
                    f"strategy {strategy.name!r} trains in one process: use a strategy for several "
                    "processes such as 'ddp', guard the call with `if trainer.is_global_zero:`, or "
                    f"set {CLUSTER_VARIABLE}=none to let each process work for itself"
                )
            return
        local = self._number(environment, "local_world_size")
        if local is not None and local != len(devices):
            raise ConfigurationError(
                f"devices={self.request.devices!r} means {len(devices)} process(es) on each node, "
                f"but {environment.name} has started {local} here"
                f"{self._said_by(environment, 'local_world_size', 'world_size')}: make the two "
                "agree, or leave devices='auto'"
            )
        if world != len(devices) * num_nodes:
            raise ConfigurationError(
                f"{len(devices)} device(s) on each of {num_nodes} node(s) make "
                f"{len(devices) * num_nodes} processes, but {environment.name} has started "
                f"{world}{self._said_by(environment, 'world_size')}: make the two agree, or leave "
                "devices='auto' and num_nodes=1"
            )

    def _said_by(self, environment: Selection, *what: str) -> str:
        """Return the variables that hold these numbers, as they are, in parentheses."""
        names = (getattr(environment.spec, f"{each}_variable", "") for each in what)
        environ = self.request.environ
        said = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        return said and f" ({said})"

    # -- launcher, precision, checkpoint IO

    def _launcher(
        self,
        strategy: Selection,
        capabilities: Capabilities,
        environment: Selection,
        external: bool,
    ) -> Selection:
        if capabilities.one_process:
            return self._find("launcher", "in_process", "the strategy needs one process")
        if external:
            return self._find(
                "launcher", "external", f"{environment.name} has started the processes"
            )
        name = self.preset.get("launcher", capabilities.launchers[0])
        if name not in capabilities.launchers:
            raise ConfigurationError(
                f"the strategy {strategy.name!r} is started by "
                f"{_either(capabilities.launchers)}, received launcher={name!r}"
            )
        selected = self._find("launcher", name, f"how {strategy.name} starts its processes")
        launcher = selected.spec
        needs_script = isinstance(launcher, LauncherSpec) and not launcher.interactive
        if self.request.interactive and needs_script:
            notebook = "ddp_notebook" in self.registry.names("strategy")
            raise ConfigurationError(
                f"the strategy {strategy.name!r} starts its processes by the launcher {name!r}, "
                "which needs a script and cannot work in a notebook or an interactive "
                "interpreter: move the code to a script, or pass devices=1"
                + (", or strategy='ddp_notebook'" if notebook else "")
                + (
                    ", or start_method='fork' to the strategy"
                    if "fork" in capabilities.launchers
                    else ""
                )
            )
        return selected

    def _precision(
        self, strategy: Selection, capabilities: Capabilities, accelerator: Selection
    ) -> Selection:
        asked = self._asked("precision", "32-true")
        if isinstance(asked, (str, int)):
            why = "the default" if asked == "32-true" else "you named it"
            of_engine = _of_engine(str(asked), capabilities)
            if of_engine is not None:
                why += f"; {strategy.name} does it itself"
                selected = Selection("precision", of_engine.name, strategy.provider, why, of_engine)
            else:
                selected = self._find("precision", str(asked), why)
        else:
            name = getattr(asked, "name", None)
            if not isinstance(name, str):
                raise ConfigurationError(
                    f"precision={asked!r}: expected a name, 64, 32, 16, 'bf16', or an instance of "
                    "stratagem.precision.Precision"
                )
            selected = Selection("precision", name, _GIVEN, "you passed it", asked)
        if (
            capabilities.precisions is not None
            and selected.spec is not None
            and selected.name not in capabilities.precisions
        ):
            raise ConfigurationError(
                f"the strategy {strategy.name!r} takes the precisions "
                f"{_either(capabilities.precisions)}, received precision={asked!r}: change one of "
                "the two"
            )
        spec = selected.spec
        if isinstance(spec, PrecisionSpec) and not _takes(spec.accelerators, accelerator):
            raise ConfigurationError(
                f"precision={asked!r} works on {_either(spec.accelerators)}, received "
                f"accelerator={accelerator.name!r}: change one of the two"
            )
        return selected

    def _checkpoint_io(self, capabilities: Capabilities) -> Selection:
        asked = self._asked("checkpoint_io", None)
        if asked is None:
            return self._find("checkpoint_io", capabilities.checkpoint_io, "the default")
        if isinstance(asked, str):
            return self._find("checkpoint_io", asked, "you named it")
        _check_object(
            "checkpoint_io", asked, "save_checkpoint", "stratagem.checkpoint.CheckpointIO"
        )
        name = type(asked).__name__
        return Selection("checkpoint_io", name, _GIVEN, "you passed it", asked)

    def _written_behind(self, selected: Selection) -> Selection:
        """Return a checkpoint format as `async_save` has it: itself, or the asynchronous one."""
        if not self.request.async_save or selected.name == ASYNC:
            return selected
        behind = self._find("checkpoint_io", ASYNC, f"async_save=True; it writes {selected.name}")
        assert behind.spec is not None
        inner = selected.name if selected.spec is not None else selected.source
        return replace(behind, source=replace(behind.spec, init_args={"inner": inner}))

    def _asked(self, part: str, default: Any) -> Any:
        """Return what was asked for, in the request or in the strategy's own arguments."""
        in_request = getattr(self.request, part)
        in_strategy = self.preset.get(part)
        if in_request is None or in_request == default:
            return default if in_strategy is None else in_strategy
        if in_strategy is not None and in_strategy != in_request:
            raise ConfigurationError(
                f"{part}={in_request!r} was passed, but the strategy was made with "
                f"{part}={in_strategy!r}: give it in one place"
            )
        return in_request

    def _find(self, kind: str, name: str, why: str) -> Selection:
        return _selection(self.registry.find(kind, name), why)


def _check_object(part: str, given: Any, method: str, base: str) -> None:
    """Refuse an object that is not of a part's kind, or a class in the place of an object."""
    if isinstance(given, type) or not hasattr(given, method):
        raise ConfigurationError(
            f"{part}={given!r}: expected a name or an instance of {base}"
            + (", received a class: call it" if isinstance(given, type) else "")
        )


def _selection(candidate: Candidate, why: str) -> Selection:
    provider = f"{candidate.distribution} {candidate.version}"
    return Selection(candidate.spec.kind, candidate.spec.name, provider, why, candidate.spec)


def _capabilities(strategy: Selection) -> Capabilities:
    spec = strategy.spec
    if isinstance(spec, StrategySpec):
        return spec.capabilities
    capabilities: Capabilities = strategy.source.capabilities
    return capabilities


def _of_engine(asked: str, capabilities: Capabilities) -> PrecisionSpec | None:
    """Return the spec of a precision that the strategy's engine implements, or None."""
    name = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true"}.get(asked, asked).casefold()
    if name not in capabilities.engine_precisions:
        return None
    return PrecisionSpec(
        name=name,
        target="stratagem.interfaces.precision:EnginePrecision",
        api_version=1,
        summary="by the strategy's engine",
        init_args={"name": name},
    )


def _preset_parts(strategy: Selection) -> dict[str, Any]:
    """Return the parts that a strategy was given when it was made or registered."""
    if strategy.spec is None:
        return dict(strategy.source.requested)
    arguments = strategy.spec.init_args
    renamed = {"precision": "precision_plugin"}
    parts = ("accelerator", "precision", "checkpoint_io", "cluster_environment", "launcher")
    presets = {part: arguments.get(renamed.get(part, part)) for part in parts}
    if presets["launcher"] is None and "start_method" in arguments:
        presets["launcher"] = START_METHODS.get(arguments["start_method"])
    return {part: value for part, value in presets.items() if value is not None}


def probe_accelerator(accelerator: Any) -> Availability:
    """Return what an accelerator (its spec, or an object) finds on this machine.

    A probe that fails finds nothing, and its error is the reason: a vendor's broken SDK must not
    stop a request that can be met without it.
    """
    try:
        if isinstance(accelerator, AcceleratorSpec):
            function = load_target(accelerator.probe, what=f"probe of {accelerator.name!r}")
        else:
            function = accelerator.availability
        found = function()
    except (Exception, SystemExit) as error:
        return Availability(0, f"its probe failed with {type(error).__name__}: {error}")
    if not isinstance(found, Availability):
        return Availability(
            0, f"its probe returned {found!r}; expected stratagem.discovery.Availability"
        )
    return found


def _takes(accepted: tuple[str, ...] | None, accelerator: Selection) -> bool:
    """Whether a list of accelerator names holds this one, under its name or an alias."""
    if accepted is None:
        return True
    names = {accelerator.name}
    if accelerator.spec is not None:
        names.update(accelerator.spec.aliases)
    return not names.isdisjoint(accepted)


def _either(names: tuple[str, ...] | None) -> str:
    return " or ".join(repr(name) for name in names or ())
