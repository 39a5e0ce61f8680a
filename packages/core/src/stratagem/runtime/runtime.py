"""Runtime: a resolved plan, its strategy, and the launch of its processes."""

from __future__ import annotations

import functools
import inspect
import json
import multiprocessing
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, ParamSpec, TypeVar

from torch import nn

from stratagem.discovery.absent import remedies
from stratagem.discovery.hints import missing_backend
from stratagem.discovery.registry import get_registry, nearest_of
from stratagem.errors import (
    ConfigurationError,
    PluginError,
    StratagemError,
    format_names,
    hide_frames,
)
from stratagem.interfaces.accelerator import Accelerator
from stratagem.interfaces.checkpoint_io import CheckpointIO
from stratagem.interfaces.cluster_environment import ClusterEnvironment
from stratagem.interfaces.components import Components
from stratagem.interfaces.contract_checks import (
    check_overrides,
    check_strategy,
    context_of,
    misspelled_methods,
)
from stratagem.interfaces.launcher import Launcher
from stratagem.interfaces.precision import Precision
from stratagem.interfaces.ranks import Ranks
from stratagem.interfaces.strategy import Strategy
from stratagem.launch.environment import environment_of_request
from stratagem.launch.process import numpy_warned_once, open_standard_streams, print_hint_once
from stratagem.launch.rank import run_as_rank, this_rank
from stratagem.plan.plan import RunPlan, RunRequest
from stratagem.plan.resolution import resolve
from stratagem.plan.step_options import StepOptions
from stratagem.rng import inherit_rng, inherited_rng
from stratagem.runtime.checkpoint_writer import CheckpointWriter
from stratagem.runtime.empty_init import SkippedInit
from stratagem.runtime.set_up import note_set_up, tear_down_left

Devices = int | str | list[int] | tuple[int, ...] | None
"""How many (an int; -1: all), which ([1, 4] or "1, 4"), or "auto"."""
Plugin = str | Precision | ClusterEnvironment | CheckpointIO | Launcher
"""A component, or the name of one."""

_ARGUMENTS_VARIABLE = "STRATAGEM_LITE"
"""The environment variable of arguments that `stratagem run` gives in a script's place: JSON."""

P = ParamSpec("P")
Result = TypeVar("Result")

_CLASSES = {
    "cluster_environment": ClusterEnvironment,
    "checkpoint_io": CheckpointIO,
    "precision": Precision,
    "launcher": Launcher,
}
"""By the request's field; a name that several kinds have means the first."""


def public_call(function: Callable[P, Result]) -> Callable[P, Result]:
    """Decorate a public method: errors that report a mistake of the caller end at the call.

    An unknown argument raises a TypeError that names the nearest one.
    """
    signature = inspect.signature(function)
    name = function.__qualname__

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            problem = str(error).replace("too many", "got too many")
            raise TypeError(f"{name}() {problem}{_advice(name, kwargs, signature)}") from None
        try:
            return function(*args, **kwargs)
        except StratagemError as error:
            if not hide_frames(error):
                raise
            # A plain `raise` would restore the frames in Python 3.10. Tracebacks show this line.
            raise error  # STRATAGEM_FULL_TRACEBACKS=1 shows all frames

    return call


def _advice(function: str, arguments: Collection[str], signature: inspect.Signature) -> str:
    kind = function.partition(".")[0]
    known = [name for name in signature.parameters if name != "self"]
    for name in arguments:
        if (remedy := remedies().get(f"{kind}({name})")) and name not in known:
            return f". Write {remedy} instead"
        if name not in known and (near := nearest_of(name, known)):
            return f". Did you mean {near!r}?"
    return f": pass arguments by name; expected {format_names(known, 10)}"


def sort_plugins(
    plugins: Plugin | Sequence[Plugin] | None, precision: str | int | Precision
) -> dict[str, Any]:
    """Return the request's components from a list of plugin objects and names.

    Raises:
        ConfigurationError: one is no component, or one kind was given twice.
    """
    components: dict[str, Any] = {"precision": precision}
    for plugin in as_list(plugins):
        kind = _kind_of(plugin)
        if kind is None:
            by_name = isinstance(plugin, str)
            providers = get_registry().possible_providers(plugin) if by_name else []
            problem = (
                f"plugins has {plugin!r}; expected a CheckpointIO, a ClusterEnvironment, a "
                "Launcher or a Precision, or the name of one (`stratagem doctor` lists them)"
            )
            raise ConfigurationError(". ".join((problem, *providers)))
        if kind in components and components[kind] != "32-true":
            raise ConfigurationError(
                f"{kind} was given twice: {components[kind]!r} and {plugin!r}; give it once"
            )
        components[kind] = plugin
    return components


def _kind_of(plugin: Any) -> str | None:
    """Return which field of the request a plugin fills, or None."""
    if isinstance(plugin, str):
        return next((kind for kind in _CLASSES if get_registry().has(kind, plugin)), None)
    return next((kind for kind, cls in _CLASSES.items() if isinstance(plugin, cls)), None)


def as_list(value: Any) -> list[Any]:
    """Return a list for None, a single value, or a sequence of values."""
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def launch_arguments() -> dict[str, Any]:
    """Return the arguments that `stratagem run --accelerate-config` gives to Lite, by name."""
    given: dict[str, Any] = json.loads(os.environ.get(_ARGUMENTS_VARIABLE, "{}"))
    return given


class Runtime:
    """A resolved plan, its strategy, and the launch of its processes; Lite and Trainer have one.

    Args:
        accelerator, strategy, devices, num_nodes, precision, plugins, async_save:
            as `Lite` describes them.
        step_options: how the front end takes optimizer steps; None under Lite, where users take
            them.

    Attributes:
        plan: the chosen components, and the reasons.
        strategy: the bound strategy; `launch` sets up its device.
        is_launched: whether this process is a rank, with its environment set up.
        raise_errors: raises errors of background saves; None without background saves.

    Raises:
        ConfigurationError: the request cannot be met; no process has been started.
    """

    _count: ClassVar[int] = 0
    _count_of_ranks: ClassVar[int] = 0
    """The number of Runtimes with several ranks, which all ranks have alike."""

    def __init__(
        self,
        *,
        accelerator: str | Accelerator,
        strategy: str | Strategy,
        devices: Devices,
        num_nodes: int,
        precision: str | int | Precision,
        plugins: Plugin | Sequence[Plugin] | None,
        async_save: bool,
        step_options: StepOptions | None = None,
    ) -> None:
        ordinal, Runtime._count = Runtime._count, Runtime._count + 1
        plan = resolve(
            RunRequest(
                accelerator=accelerator,
                strategy=strategy,
                devices=devices,
                num_nodes=num_nodes,
                environ=environment_of_request(ordinal),
                ordinal=ordinal,
                async_save=async_save,
                step_options=step_options,
                **sort_plugins(plugins, precision),
            ),
            get_registry(),
        )
        self._build(plan)
        self._number = Runtime._count_of_ranks
        Runtime._count_of_ranks += plan.world_size > 1
        self.group = -1
        """The number of the process group that the strategy is set up in; -1: in none."""
        self.is_launched = False
        self.raise_errors: Callable[[], None] | None = None

    def _build(self, plan: RunPlan) -> Strategy:
        self.plan = plan
        strategy: Strategy = plan.strategy.build()
        self.strategy = strategy
        check_strategy(self.strategy, plan.strategy.spec, Strategy)
        self.strategy.bind(
            Components(
                accelerator=plan.accelerator.build(),
                precision=plan.precision.build(),
                checkpoint_io=plan.checkpoint_io.build(),
                cluster_environment=plan.cluster_environment.build(),
                devices=plan.devices,
                num_nodes=plan.num_nodes,
                step=plan.request.step_options,
            )
        )
        return strategy

    def divide(self, module: nn.Module) -> None:
        """Let "auto" take a strategy that divides the model, if the model is too large for DDP.

        Nothing changes after the launch, and without stratagem-backend-torch.
        """
        plan = self.plan
        is_auto = plan.request.strategy == "auto" and plan.strategy.name.startswith("ddp")
        if self.is_launched or not is_auto:
            return
        try:
            from stratagem.strategies import plan_by_memory
        except ImportError:
            return
        self.plan = plan_by_memory(plan, self.strategy, module, self._build)

    @numpy_warned_once()
    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the processes, set up their environment, and call a function on every rank.

        Args:
            function: called as `function(*args, **kwargs)`; with None, the script continues on
                every rank.

        Returns:
            The function's result on this rank.

        Raises:
            ConfigurationError: the launcher needs a function.
            RankFailedError: another rank failed; shows its traceback.
        """
        if function is not None:
            return self.starter()(self._set_up_and_call, function, *args, **kwargs)
        if self.plan.remote:
            raise ConfigurationError(
                f"the launcher {self.plan.launcher.name!r} runs a function in new processes, "
                "so launch() needs one: pass it (lite.launch(main), with main(lite)), or put "
                "the code into run() of a subclass"
            )
        return self.starter()(self._setup_environment)

    def starter(self) -> Callable[..., Any]:
        """Return the function that starts the processes and calls another function on every rank.

        Its arguments are that function, which enters `set_up_rank`, and its arguments.
        """
        open_standard_streams()
        process = multiprocessing.current_process()
        # Our own ranks see this in their launcher, and their parent raises the error.
        if getattr(process, "_inheriting", False) and not process.name.startswith("stratagem-rank"):
            raise ConfigurationError(
                f"{process.name!r}, a process such as a DataLoader's worker, imports the script, "
                "which trains when it is imported: put that code under `if __name__ == '__main__':`"
            )
        if this_rank.is_launched and self.plan.remote:
            # This process is already a rank of the launch that this call belongs to.
            return run_as_rank
        launcher = self.plan.launcher.build()
        check_overrides(type(launcher), Launcher)
        if self.plan.remote:
            return functools.partial(launcher.launch, self.plan, call_with_rng, inherited_rng())
        return functools.partial(launcher.launch, self.plan)

    def launched_strategy(self) -> Strategy:
        """Return the strategy after the launch; a single rank is launched here.

        Raises:
            ConfigurationError: several ranks, or a remote one, were not launched yet.
        """
        if not self.is_launched and self.plan.world_size == 1 and not self.plan.remote:
            self.launch()  # starts no process: this one is the only rank
        if not self.is_launched:
            raise ConfigurationError(
                "nothing was launched yet: call lite.launch() first, or put the code into a "
                "subclass's run() and call that"
            )
        return self.strategy

    @property
    def ranks(self) -> Ranks:
        """The processes that train together, as this one sees them."""
        return self.strategy.ranks

    @property
    def checkpoint_writer(self) -> CheckpointWriter:
        """Saves and loads checkpoints from all ranks together."""
        strategy = self.strategy
        return CheckpointWriter(
            strategy.ranks,
            strategy.checkpoint_io,
            supports_shards=strategy.capabilities.sharded_state,
        )

    @contextmanager
    def init_module(self, *, empty: bool = False) -> Iterator[None]:
        """Create parameters on the device, in the precision's dtype and as the strategy shards."""
        strategy = self.launched_strategy()
        values = SkippedInit() if empty else nullcontext()
        # The strategy's context is made on its device.
        with (
            strategy.device,
            strategy.precision.init_context(),
            context_of(strategy.model_context),
            values,
        ):
            yield

    def _set_up_and_call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.set_up_rank():
            return function(*args, **kwargs)

    @contextmanager
    def set_up_rank(self) -> Iterator[None]:
        """Set up this rank; at the end wait for its saves, or tell the others of its error."""
        self._setup_environment()
        try:
            yield
            self.strategy.checkpoint_io.wait()
        except SystemExit:
            raise  # an orderly end
        except BaseException as error:
            if self.plan.world_size > 1:
                this_rank.fail_run(error)
            raise

    def _setup_environment(self) -> None:
        """Wait for the other ranks; set up the strategy, unless this was done in their group."""
        begin = this_rank.begin_run if self.plan.world_size > 1 else None
        group = begin(self._number) if begin is not None else 0
        if self.is_launched and self.group == group:
            return
        strategy, plan = self.strategy, self.plan
        tear_down_left()
        strategy.setup_environment()
        if strategy.ranks.device is None:
            raise PluginError(
                f"{type(strategy).__name__}.setup_environment does not call "
                "super().setup_environment(), which sets up the device and joins the other ranks: "
                "call it"
            )
        if strategy.ranks.world_size != plan.world_size:
            raise PluginError(
                f"{type(strategy).__name__} was launched as {plan.world_size} rank(s), and its "
                f"ranks are {strategy.ranks.world_size}: its capabilities say one_process="
                f"{plan.capabilities.one_process}, and its make_ranks() returned something else; "
                "subclass ParallelStrategy for one process a device"
            )
        if plan.request.strategy == "auto" and plan.world_size > 1:
            _check_same(strategy.ranks, plan.strategy.name)
        checkpoint_io = strategy.checkpoint_io
        checkpoint_io.setup(strategy.ranks, plan.strategy.name)
        if checkpoint_io.asynchronous:
            self.raise_errors = checkpoint_io.raise_errors
        names = get_registry().names("accelerator")
        missing = missing_backend(plan.request.accelerator, names)
        if strategy.ranks.is_global_zero:
            parts = (strategy, strategy.accelerator, strategy.precision, checkpoint_io)
            hints = [hint for part in parts for hint in misspelled_methods(type(part))]
            for hint in filter(None, (missing, *hints)):
                print_hint_once(hint)
        if not self.is_launched:
            note_set_up(strategy)
        self.is_launched, self.group = True, group


def call_with_rng(
    inherited: dict[str, Any], function: Callable[..., Result], *args: Any, **kwargs: Any
) -> Result:
    """Call a function with the random numbers that the launching process would have drawn."""
    inherit_rng(inherited)
    return function(*args, **kwargs)


class FrontEnd:
    """The base of Trainer and Lite: the place of this process, and its devices."""

    _runtime: Runtime

    @property
    def ranks(self) -> Ranks:
        """The processes of the run; collectives work after the launch."""
        return self._runtime.ranks

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return self.ranks.global_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self.ranks.local_rank

    @property
    def node_rank(self) -> int:
        """The rank of this process's node."""
        return self.ranks.node_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.ranks.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.is_global_zero

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator."""
        return self._runtime.strategy.accelerator

    @property
    def precision(self) -> str:
        """The name of the precision; `precision_plugin` is the object."""
        return self._runtime.strategy.precision.name

    @property
    def precision_plugin(self) -> Precision:
        """The precision."""
        return self._runtime.strategy.precision

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self._runtime.plan.num_nodes

    @property
    def device_ids(self) -> list[int]:
        """The indices of this node's devices."""
        return list(self._runtime.plan.devices)

    @property
    def num_devices(self) -> int:
        """The number of devices of each node."""
        return len(self._runtime.plan.devices)


def _check_same(ranks: Ranks, chosen: str) -> None:
    first = ranks.broadcast(chosen)
    if chosen != first:
        raise ConfigurationError(
            f"strategy='auto' chose {first!r} on rank 0 and {chosen!r} on rank "
            f"{ranks.global_rank}, whose device has another memory: name the strategy"
        )
