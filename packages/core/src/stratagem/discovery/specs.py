"""Specs: frozen descriptions of components, readable without importing the components."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from stratagem.discovery.capabilities import Capabilities, check_fields
from stratagem.discovery.former import with_former_names
from stratagem.errors import MissingPackageError, PluginError, StratagemError

PLUGIN_API_VERSION = 2
"""The version of the plugin API; a spec declares the version that it was written for. A plugin of
an earlier version works if it uses no former name (`stratagem.discovery.former`)."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

Target = str | Callable[..., Any]

Objection = str | Callable[[Any], str]
"""`"module:function"` or a function of the `RunPlan`. The function returns why the plan is
impossible, or "". It runs while a request is resolved, so it must be quick and must not import
torch."""

_PARTS = ("parameters", "gradients", "optimizer")
"""The parts of a model's training state."""


@dataclass(frozen=True, kw_only=True)
class ComponentSpec:
    """Describes one component.

    Example:
        >>> spec = StrategySpec(name="local_sgd", target="my_package.strategy:LocalSGD",
        ...                     api_version=2, summary="Average parameters every k steps")
        >>> spec.kind
        'strategy'

    Raises:
        PluginError: a field does not have the form described here.
    """

    kind: ClassVar[str] = "component"

    name: str
    """The name that users type: letters, digits, `_`, `-` and `.`. Case is ignored."""
    target: Target
    """`"package.module:Class"`, imported when the component is used. Code that registers a
    component at run time may give the class itself."""
    api_version: int
    """`PLUGIN_API_VERSION` of the core that the plugin was written for, as a literal number."""
    summary: str = ""
    """One line for listings."""
    init_args: Mapping[str, Any] = field(default_factory=dict)
    """Preset keyword arguments of the target."""
    aliases: tuple[str, ...] = ()
    """Further names."""

    def __post_init__(self) -> None:
        check_fields(self, f"the {self.kind} spec {self.name!r}")
        for name in (self.name, *self.aliases):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise PluginError(
                    f"a {self.kind} spec has the name {name!r}; expected letters, digits, '_', "
                    "'-' and '.', beginning with a letter or digit"
                )
            if name.casefold() == "auto":
                raise PluginError(
                    f"a {self.kind} spec has the name {name!r}, by which users leave the choice to "
                    "Stratagem, so that nobody could select it: choose another one"
                )
        if not callable(self.target) and not is_target(self.target):
            raise PluginError(
                f"the {self.kind} spec {self.name!r} has target={self.target!r}; expected "
                "'package.module:Class'"
            )

    @property
    def class_name(self) -> str:
        """Name of the target without its module."""
        if isinstance(self.target, str):
            return self.target.partition(":")[2]
        return getattr(self.target, "__qualname__", repr(self.target))

    def load(self) -> Any:
        """Import the target and return it.

        Raises:
            PluginError: the module cannot be imported or has no such attribute.
        """
        return load_target(self.target, what=f"{self.kind} {self.name!r}")

    def build(self, **arguments: Any) -> Any:
        """Import the target and call it with the preset arguments, updated by `arguments`."""
        return self.load()(**{**self.init_args, **arguments})


@final
@with_former_names
@dataclass(frozen=True, kw_only=True)
class StrategySpec(ComponentSpec):
    """Describes a strategy."""

    kind: ClassVar[str] = "strategy"
    capabilities: Capabilities = field(default_factory=Capabilities)
    """The strategy's capabilities: the same object as in its class."""
    shards: tuple[str, ...] = ()
    """The parts that are sharded over ranks: some of "parameters", "gradients" and "optimizer" (its
    state). Stratagem uses it to predict whether a model fits in device memory."""
    offloads: tuple[str, ...] = ()
    """The parts kept in host memory: some of the same names."""
    placement_arguments: tuple[str, ...] = ()
    """The names of the arguments that choose where tensors are kept, such as "cpu_offload".
    `stratagem plan` runs one step for strategies that differ in these arguments alone."""
    incompatible_because: Objection | None = None
    """A function that returns why the strategy cannot be used in a plan that selects it. `bind` of
    its class checks the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("shards", "offloads"):
            parts = getattr(self, name)
            if not isinstance(parts, tuple) or not set(parts) <= set(_PARTS):
                raise PluginError(
                    f"the strategy spec {self.name!r} has {name}={parts!r}; expected a tuple of "
                    f"some of {', '.join(map(repr, _PARTS))}"
                )
        if not isinstance(self.capabilities, Capabilities):
            raise PluginError(
                f"the strategy spec {self.name!r} has capabilities={self.capabilities!r}; expected "
                "stratagem.discovery.Capabilities"
            )


@final
@dataclass(frozen=True)
class Availability:
    """The devices that an accelerator's probe found.

    Attributes:
        count: number of devices; 0: no device can be used.
        reason: why, in a few words ("2 cores", "no driver").
        auto_count: number of devices that `devices="auto"` uses; None: all devices.
        indexed: devices have indices, and at most `count` can be used; False (the CPU): any number
            of processes may share the hardware.
        problems: (index, problem) for each counted device that this process cannot use. The problem
            completes the sentence "device 0 ..." ("is in exclusive use by the process 7").
        memory: bytes of the smallest device, or of the memory that all processes share; None:
            unknown.

    Example:
        >>> from stratagem.accelerators import Availability, CPUAccelerator
        >>> isinstance(CPUAccelerator().availability(), Availability)
        True
    """

    count: int
    reason: str
    auto_count: int | None = None
    indexed: bool = True
    problems: tuple[tuple[int, str], ...] = ()
    memory: int | None = None

    @property
    def free(self) -> tuple[int, ...]:
        """Indices of the devices that this process can use.

        Example:
            >>> Availability(3, "3 GPUs", problems=((1, "is taken"),)).free
            (0, 2)
        """
        taken = dict(self.problems)
        return tuple(index for index in range(self.count) if index not in taken)


@final
@with_former_names
@dataclass(frozen=True, kw_only=True)
class AcceleratorSpec(ComponentSpec):
    """Describes an accelerator."""

    kind: ClassVar[str] = "accelerator"
    probe: str | Callable[[], Availability]
    """`"module:function"` or a function without arguments that returns an `Availability`. It runs
    while a request is resolved, so it must be quick and should not import an SDK."""
    priority: int = 0
    """`accelerator="auto"` selects the available accelerator of highest priority (CPU has 0)."""
    requires_dedicated_strategies: bool = False
    """Its devices need strategies written for them. A strategy for any accelerator
    (`Capabilities.accelerators=None`) cannot be used with it."""
    data_parallel_kernels: bool = False
    """Whether `torch.nn.DataParallel` works on its devices; the same as in its class."""


@final
@with_former_names
@dataclass(frozen=True, kw_only=True)
class PrecisionSpec(ComponentSpec):
    """Describes a precision."""

    kind: ClassVar[str] = "precision"
    accelerators: tuple[str, ...] | None = None
    """Names of the supported accelerators; None: any."""
    shardable: bool = True
    """Whether its parameters can be sharded over ranks; the same as in its class."""
    requires: tuple[str, ...] = ()
    """Further distributions that it needs, such as "torchao>=0.13,<1". The field is for listings:
    the class itself refuses to be bound without them."""
    incompatible_because: Objection | None = None
    """A function that returns why the precision cannot be used in a plan that selects it. `bind` of
    its class checks the same."""


@final
class CheckpointIOSpec(ComponentSpec):
    """Describes a checkpoint format."""

    __slots__ = ()
    kind: ClassVar[str] = "checkpoint_io"


@final
@with_former_names
@dataclass(frozen=True, kw_only=True)
class ClusterEnvironmentSpec(ComponentSpec):
    """Describes a cluster environment: the source of ranks, world size and main address."""

    kind: ClassVar[str] = "cluster_environment"
    variables: tuple[str, ...] = ()
    """Environment variables that identify the cluster: it is detected if all of them are set. The
    first identifies the cluster. The others show that the cluster started this process as one of
    several ranks."""
    advice: str = ""
    """The remedy if the first variable is set but others are missing, as in a job whose script was
    not started by the cluster's launcher."""
    incompatible_because: str | Callable[[Mapping[str, str]], str] | None = None
    """`"module:function"` or a function of the environment variables. It is called if all variables
    are set. It returns why this process is not a rank of this cluster, or ""."""
    priority: int = 0
    """If several cluster environments are detected, the highest priority wins."""
    world_size_variable: str = "WORLD_SIZE"
    local_world_size_variable: str = "LOCAL_WORLD_SIZE"
    rank_variable: str = "RANK"
    local_rank_variable: str = "LOCAL_RANK"
    """Names of the variables that hold these numbers. A plan is checked against them before any
    import. A process that has the last variable was started as one of several ranks."""
    local_world_size: str | Callable[[Mapping[str, str]], int] | None = None
    """`"module:function"` or a function of the environment variables. It returns the number of
    ranks on this node, for a cluster without a variable for this number. The variable that it reads
    is then named by local_world_size_variable, for messages."""

    def why_not(self, environ: Mapping[str, str]) -> str:
        """Return why this process is not a rank of this cluster, or "" for a rank.

        Example:
            >>> spec = ClusterEnvironmentSpec(name="mine", target="my_package:Mine", api_version=2,
            ...                               variables=("MINE_JOB", "MINE_RANK"),
            ...                               advice="start it with minerun")
            >>> spec.why_not({"MINE_JOB": "7"})
            'MINE_RANK is not set, though MINE_JOB is: start it with minerun'
        """
        missing = [variable for variable in self.variables if variable not in environ]
        if missing and missing[0] == self.variables[0]:
            return f"{missing[0]} is not set"
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            text = f"{', '.join(missing)} {verb} not set, though {self.variables[0]} is"
            return f"{text}: {self.advice}" if self.advice else text
        if self.incompatible_because is None:
            return ""
        incompatible_because: str = asked_function(self, "incompatible_because", environ)
        return incompatible_because


@final
@dataclass(frozen=True, kw_only=True)
class LauncherSpec(ComponentSpec):
    """Describes a launcher, the component that starts the ranks.

    A Launcher that is passed as an object has class attributes with the same names.
    """

    kind: ClassVar[str] = "launcher"
    starts_ranks: bool = True
    """It starts ranks, and can start any strategy with `launchers=None`; False: it runs the
    function in existing processes."""
    interactive: bool = False
    """It works in a notebook or an interactive interpreter."""
    new_processes: bool = False
    """The function runs in new processes. The calling process is not a rank, and receives only the
    function's return value."""
    spans_nodes: bool = False
    """It starts ranks on all nodes from the calling process: num_nodes > 1 needs no cluster
    environment."""
    devices_elsewhere: bool = False
    """The ranks' devices are not on the calling machine. Accelerators are not probed there, and the
    request names the accelerator and the number of devices per node."""
    cluster_environment: str = "plain"
    """Name of the cluster environment that its ranks read. A launcher's own cluster environment
    gives the run's id, the number of restarts and the address of rank 0."""


@final
class LoggerSpec(ComponentSpec):
    """Describes a logger; its target gets `save_dir`, a local folder, if it accepts `save_dir`."""

    __slots__ = ()
    kind: ClassVar[str] = "logger"


@final
class CallbackSpec(ComponentSpec):
    """Describes a callback, for `Trainer(callbacks=["name"])` and `stratagem.callbacks`."""

    __slots__ = ()
    kind: ClassVar[str] = "callback"


@final
class ProfilerSpec(ComponentSpec):
    """Describes a profiler, for `Trainer(profiler="name")` and `stratagem.profilers`."""

    __slots__ = ()
    kind: ClassVar[str] = "profiler"


@final
class NameSpec(ComponentSpec):
    """Describes an import name that a distribution adds to a module of core.

    Its name is the path that users import: `"stratagem.Tuner"` for `from stratagem import Tuner`.

    Example:
        >>> spec = NameSpec(name="stratagem.Tuner", target="my_package:Tuner", api_version=2)
        >>> spec.module, spec.import_name
        ('stratagem', 'Tuner')
    """

    __slots__ = ()
    kind: ClassVar[str] = "name"

    @property
    def module(self) -> str:
        """The module that serves the name."""
        return self.name.rpartition(".")[0]

    @property
    def import_name(self) -> str:
        """The name in that module."""
        return self.name.rpartition(".")[2]


def asked_function(spec: ComponentSpec, field: str, *arguments: Any) -> Any:
    """Call a function that a spec names, and return its result.

    Args:
        spec: the spec.
        field: the field that names the function.
        *arguments: arguments of the function.

    Raises:
        PluginError: the function cannot be imported, or fails; names the component.

    Example:
        >>> from stratagem.discovery.specs import asked_function
        >>> spec = StrategySpec(name="mine", target="my_package:Mine", api_version=2,
        ...                     incompatible_because=lambda plan: "")
        >>> asked_function(spec, "incompatible_because", None)
        ''
    """
    what = f"{field} of the {spec.kind} {spec.name!r}"
    function = load_target(getattr(spec, field), what=what)
    # A plugin's own code: its exception would not name the plugin.
    try:
        return function(*arguments)
    except StratagemError:
        raise
    except Exception as error:
        raise PluginError(
            f"the {what} failed with {type(error).__name__}: {error}: disable its plugin with "
            "STRATAGEM_DISABLE_PLUGINS, or take another one"
        ) from error


def is_target(target: object) -> bool:
    """Return whether an object is a string of the form `"package.module:name"`."""
    return isinstance(target, str) and _TARGET.fullmatch(target) is not None


def load_target(target: Target, *, what: str) -> Any:
    """Import `"module:attribute"`; a target that is an object is returned unchanged.

    Raises:
        PluginError: the import fails or the attribute is missing; `what` names the component.
    """
    if not isinstance(target, str):
        return target
    module_name, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (MissingPackageError, KeyboardInterrupt):
        raise  # the first error names the package to install
    # A vendor's SDK may raise any exception at import; the error names the component.
    except BaseException as error:
        raise PluginError(
            f"cannot import {what}: target={target!r} failed with "
            f"{type(error).__name__}: {error}. {_remedy(target, error)}"
        ) from error
    return found


def _remedy(target: str, error: BaseException) -> str:
    """Return a remedy for a target that cannot be imported."""
    package = target.partition(":")[0].partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and f"{error.name}.".startswith(f"{package}."):
        from stratagem.discovery.registry import get_registry

        if distribution := get_registry().provider_of(target):
            return (
                f"{distribution} is only partly installed: pip install --force-reinstall "
                f"--no-deps {distribution}"
            )
    if isinstance(error, ModuleNotFoundError) and f"{error.name}".startswith("stratagem."):
        return (
            "It was made for another release of stratagem-core: docs/extend/plugin-api.md lists "
            "the modules that have moved, and `stratagem doctor` the imports of an installed plugin"
        )
    return (
        "Its distribution or the SDK that it needs is broken or missing; `stratagem doctor` says "
        "more"
    )
