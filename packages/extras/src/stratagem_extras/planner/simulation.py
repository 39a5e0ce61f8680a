"""Steps of a strategy's own code, on real tensors or as one of many simulated ranks."""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, debug
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer, optimizer as torch_optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from stratagem.accelerators import CPUAccelerator
from stratagem.discovery import get_registry
from stratagem.errors import ConfigurationError
from stratagem.strategies import (
    ActivationCheckpointing,
    Components,
    ParallelStrategy,
    PreparedModel,
    Recompute,
    StepMemory,
    StepModule,
    Strategy,
    TrainStep,
    apply_activation_checkpointing,
    check_activation_checkpointing,
)
from stratagem_extras.planner.fake_mode import PlanningMode
from stratagem_extras.planner.meter import Kind, MemoryMeter, Peak
from stratagem_extras.planner.modules import ModuleWatch, with_all_layers
from stratagem_extras.planner.moments import Moments, extrapolated, named

if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::broadcast_", "Meta"):
    import torch.distributed._tools.fake_collectives  # which registers them, up to torch 2.9

_KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "buffers")
_WITHOUT_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedOperatorException,
)
_NEEDS_MEMORY = re.compile(
    r"numpy|data pointer|data_ptr|access storage|'Meta' backend|no fake impl"
)
_FEWEST, _MOST = 3, 24
"""Of many equal layers so many are run, and one more; what further ones hold is extrapolated."""
_MICRO_BATCHES = 2
"""Of many micro-batches so many are run, and one more."""
_BEYOND_BUCKETS = 100_000_000
"""Parameters that the layers have which are run, where up to 12 have them: engines communicate in
buckets and gather layers ahead up to a number of parameters, below which a layer adds something
else."""
_BEYOND_LIMIT = 1.2
"""How far beyond an engine's limit the parameters go of the layers that are run."""


@dataclass(frozen=True)
class PlannedMemory(StepMemory):
    """The memory of a process in a step, with the parts of `working`.

    Attributes:
        activations: the tensors that forward keeps for backward, and the batch.
        communication: the tensors that collectives read and write: gathered parameters, buckets of
            gradients.
    """

    activations: int = 0
    communication: int = 0

    @property
    def temporary(self) -> int:
        """The rest of `working`: results of operations that are not kept."""
        return self.working - self.activations - self.communication


@dataclass(frozen=True)
class Workload:
    """The training run of a simulation, except for the model.

    Attributes:
        batch: returns a micro-batch of one rank.
        loss: returns the loss of a model and a micro-batch.
        optimizer: creates the optimizer of a model with its final trained parameters.
        micro_batches: the number of micro-batches in an optimizer step.
    """

    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    micro_batches: int = 1


def measure_step(
    strategy: Strategy,
    workload: Workload,
    model: Callable[[], nn.Module],
    watch: ModuleWatch | None = None,
    layers: tuple[Mapping[str, int], Mapping[str, bool]] | None = None,
) -> dict[str, PlannedMemory]:
    """Take two steps under a prepared strategy; return the second one's memory by phase.

    The optimizer makes its state in the first step. A strategy that runs the model to find layers
    has an attribute `example_input`. If that is None, `prepare` gets the arguments of the model's
    first call in a step.

    Args:
        strategy: the strategy, with its environment set up.
        workload: the training run.
        model: returns the model, which is changed.
        watch: attributes the memory to modules.
        layers: also divides the phases by layers; see `Moments`.

    Returns:
        The memory for "forward", "backward" and "step"; and for "scatter", if gloo is simulated.
    """
    prepared: list[PreparedModel] = []
    trained: set[int] = set()
    meter = MemoryMeter(
        lambda: _known(prepared[0], trained) if prepared else {},
        with_gloo=getattr(strategy.accelerator, "plans_for", "") == "cpu",
    )
    with meter:
        made = model()
        meter.add(made.parameters())
        meter.add(made.buffers())
        prepared.append(_prepared(strategy, workload, made))
        if watch is not None:
            watch.begin(made, meter)
        trained.update(map(id, prepared[0].original.parameters()))
        step = _Step(strategy, prepared[0], meter)
        if layers is not None:
            Moments(*layers, step.enter_moment).begin(made)
        for _ in range(2):
            step.start()
            batches = [workload.batch() for _ in range(workload.micro_batches)]
            strategy.train_step(prepared[0], step, batches)
            step.enter("")
        strategy.release(prepared[0])
        if watch is not None:
            watch.close()
    return {
        phase: replace(memory, sent=step.sent, flops=step.flops)
        for phase, memory in step.held.items()
    }


def _prepared(strategy: Strategy, workload: Workload, model: nn.Module) -> PreparedModel:
    known: Any = strategy
    lacks_example = getattr(known, "example_input", ...) is None
    own = getattr(model, "example_input_array", None)
    if lacks_example and own is None:
        known.example_input = example_of(workload, model)
    try:
        return strategy.prepare(
            _PlannedModule(model, workload.loss),
            lambda: [workload.optimizer(model)],
            move_to_device=False,
        )
    finally:
        if lacks_example:
            known.example_input = None  # else its memory would count


class SimulatedModel:
    """A model without memory; each strategy gets a copy.

    Args:
        model: a function that builds it, or the model, which is not changed.
        checkpointing: the modules that compute their activations again in backward.

    Raises:
        Exception: an exception of the function for tensors without values.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        checkpointing: ActivationCheckpointing = None,
    ) -> None:
        self.checkpointing = check_activation_checkpointing(checkpointing)
        self.mode = PlanningMode()
        with self.mode:
            self.model = _copy(model) if isinstance(model, nn.Module) else model()
        parameters = list(self.model.parameters())
        if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
            raise ConfigurationError(
                "the model has lazy layers without a shape: run it on a batch in the function "
                "that builds it"
            )
        if not any(parameter.requires_grad for parameter in parameters):
            raise ConfigurationError(
                "the model has no parameter with requires_grad=True, so nothing is trained"
            )
        # A share of the layers makes equal layers differ in memory.
        is_even = not isinstance(checkpointing, Recompute) or checkpointing.share == 1
        self.stacks = {
            name: len(list(part.children()))
            for name, part in _outermost_lists(self.model)
            if is_even and _has_equal_layers(part)
        }
        """The number of layers of each outermost list of equal layers, by its name."""

    def simulate_step(
        self, strategy: Strategy, workload: Workload, watch: ModuleWatch | None = None
    ) -> dict[str, PlannedMemory]:
        """Return a rank's memory in the moments of a step, without memory and other ranks.

        The strategy's own code runs, on fake tensors. Collectives return immediately. Code that
        reads a value of a tensor reads 1. Only some of many equal layers run: each further layer
        adds the same amount to the maximum of each moment. A strategy with an engine that
        communicates or gathers a limited number of parameters at a time declares the limits in
        `parameter_limits`, a collection of numbers, so that enough layers run. Of many
        micro-batches two and three run, and each further one adds the same amount. If
        ranks hold different parts of a model, the strategy names them in `unequal_ranks`, and all
        layers and micro-batches run.

        Args:
            strategy: set up by `simulated_ranks`.
            workload: the training run.
            watch: attributes the memory to modules, with all layers.

        Returns:
            The memory by the name of the moment; `by_phase` finds the phases.

        Raises:
            Exception: an exception of the strategy's or the model's code for such tensors.
        """
        is_whole = len(getattr(strategy, "unequal_ranks", ())) > 1
        further = workload.micro_batches - _MICRO_BATCHES - 1
        if further > _MICRO_BATCHES and not is_whole:
            few, more = (
                self.simulate_step(strategy, replace(workload, micro_batches=count), watching)
                for count, watching in ((_MICRO_BATCHES, watch), (_MICRO_BATCHES + 1, None))
            )
            return _with_further_batches(few, more, further)

        def step(
            kept: dict[str, int], watch: ModuleWatch | None = None
        ) -> dict[str, PlannedMemory]:
            model = partial(self._shortened, kept)
            with self._without_memory(strategy):
                return measure_step(strategy, workload, model, watch, (run, whole))

        limits = getattr(strategy, "parameter_limits", ())
        run = dict(self.stacks)
        if not is_whole:
            run = {stack: self._few(stack, layers, limits) for stack, layers in run.items()}
        whole = {stack: run[stack] == layers for stack, layers in self.stacks.items()}
        moments = first = step(run, watch)
        again = None if watch is None else ModuleWatch(watch.stacks)
        rows = () if watch is None else watch.rows
        for stack, layers in self.stacks.items():
            if further := layers - run[stack]:
                longer = step({**run, stack: run[stack] + 1}, again)
                if watch is not None and again is not None:
                    layers_of = self._layers_of(stack)
                    watch.rows = with_all_layers(watch.rows, rows, again.rows, layers_of)
                moments = extrapolated(moments, first, longer, further)
        # With more layers the maximum may come at another operation, with more gradients and less
        # of the rest: their sum can be extrapolated, and how much is of gradients is at most all.
        if "step" not in moments:
            return moments  # of a strategy that takes the whole step itself
        most = moments["step"].gradients
        return {name: _with_gradients_up_to(most, memory) for name, memory in moments.items()}

    def simulate_few_layers(self, strategy: Strategy, workload: Workload) -> None:
        """Run a step of a rank with few layers and micro-batches; a refusal is raised.

        Raises:
            Exception: as `simulate_step`.
        """
        kept = {stack: min(layers, _FEWEST) for stack, layers in self.stacks.items()}
        few = replace(workload, micro_batches=min(workload.micro_batches, _MICRO_BATCHES))
        with self._without_memory(strategy):
            measure_step(strategy, few, partial(self._shortened, kept))

    def simulate_state(self, strategy: Strategy, workload: Workload) -> dict[str, PlannedMemory]:
        """Return rank 0's memory in "step" without activations; the model is not run."""
        with self._without_memory(strategy):
            prepared = _prepared(strategy, workload, self._shortened(self.stacks))
            parameters = list(prepared.original.parameters())
            for parameter in parameters:
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
            for optimizer in prepared.optimizers:
                optimizer.step()
            held = _known(prepared, {id(parameter) for parameter in parameters})
            sizes = {
                kind: sum(tensor.numel() * tensor.element_size() for tensor in held[kind])
                for kind in _KINDS
            }
            strategy.release(prepared)
        return {"step": PlannedMemory(**sizes, working=0)}

    def _layers_of(self, stack: str) -> list[str]:
        layers = self.model.get_submodule(stack).named_children()
        return [f"{stack}.{name}" if stack else name for name, _ in layers]

    def _few(self, stack: str, layers: int, limits: Collection[int]) -> int:
        """Return the number of layers to run; all, if running all costs no more.

        Args:
            stack: the name of the layers.
            layers: the number of layers.
            limits: numbers of parameters beyond which a further layer adds another amount.
        """
        one = next(self.model.get_submodule(stack).children())
        size = max(1, sum(parameter.numel() for parameter in one.parameters()))
        whole = sum(parameter.numel() for parameter in self.model.parameters())
        few = min(max(_FEWEST, -(-_BEYOND_BUCKETS // size)), 12)
        beyond = [-(-int(_BEYOND_LIMIT * limit) // size) for limit in limits if limit < whole]
        few = max([few, *(number for number in beyond if number <= _MOST)])
        return layers if layers <= 2 * few + 1 else few

    @contextmanager
    def _without_memory(self, strategy: Strategy) -> Iterator[None]:
        foreach = _foreach() if getattr(strategy.accelerator, "foreach", False) else nullcontext()
        with self.mode, patch.object(nn.Module, "_apply", _apply), foreach, _real_meshes():
            yield

    def _shortened(self, kept: dict[str, int]) -> nn.Module:
        """Return a copy with so many layers of each stack."""
        stacks = {name: self.model.get_submodule(name) for name in kept}
        whole = {name: dict(stack._modules) for name, stack in stacks.items()}
        try:
            for name, layers in kept.items():
                stacks[name]._modules = dict(list(whole[name].items())[:layers])
            model = _copy(self.model)
            apply_activation_checkpointing(model, self.checkpointing)
            return model
        finally:
            for name, modules in whole.items():
                stacks[name]._modules = modules


@contextmanager
def simulated_ranks(strategy: Strategy, components: Components, rank: int = 0) -> Iterator[None]:
    """Set up a strategy as one rank of a `simulated_group`.

    Args:
        strategy: not yet bound.
        components: their devices are the ranks.
        rank: the rank.

    Raises:
        ConfigurationError: this process has joined a process group.
    """
    with simulated_group(components, rank):
        # The group tells a strategy that this is a simulation, so that it builds no kernels.
        strategy.bind(components)
        if isinstance(strategy, ParallelStrategy):
            strategy.init_process_group = lambda: None  # type: ignore[method-assign]
        strategy.setup_environment()
        # Fake tensors cannot be sent as data: assume that other ranks would send this rank's data.
        with patch.multiple(
            type(strategy.ranks),
            broadcast=lambda ranks, data, src=0: data,
            gather_objects=lambda ranks, data: [data] * ranks.world_size,
        ):
            yield
        strategy.teardown()


@contextmanager
def simulated_group(components: Components, rank: int = 0) -> Iterator[None]:
    """Act as one rank of a process group without other processes.

    Args:
        components: their devices are the ranks.
        rank: the rank.

    Raises:
        ConfigurationError: this process has joined a process group.
    """
    if dist.is_initialized():
        raise ConfigurationError(
            "plan_memory simulates a process group, and this process has joined one: call it "
            "before processes are launched, or in another process"
        )
    if rank:
        _forget_meshes()
    threads, hook = torch.get_num_threads(), sys.excepthook
    count, local = components.device_count, rank % len(components.devices)
    variables = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(count)}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        with patch.dict(os.environ, variables):
            yield
    finally:
        dist.destroy_process_group()
        if rank:
            _forget_meshes()
        torch.set_num_threads(threads)
        sys.excepthook = hook  # a process group puts its rank before each line of later errors


def _forget_meshes() -> None:
    """Clear what DTensors remember of operations.

    They take the mesh of another rank for an equal one, and it has groups that this rank lacks.
    """
    caches: Any = debug
    clear = getattr(caches, "_clear_sharding_prop_cache", None)
    if clear is None:  # torch before 2.9
        dispatcher: Any = DTensor._op_dispatcher
        clear = dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear()


class SimulatedAccelerator(CPUAccelerator):
    """The host; its fake tensors simulate a step.

    Attributes:
        plans_for: the name of the planned accelerator, which sets defaults of an engine, such as
            sizes of buckets.
        foreach: whether the optimizer steps on an accelerator with `has_foreach_kernels`.
    """

    plans_for = "cpu"
    foreach = False


def has_foreach_kernels(accelerator: str) -> bool:
    """Return whether torch's optimizers step all parameters at once on an accelerator.

    Their intermediate results have the size of all parameters.
    """
    known: Any = torch_optimizer
    return accelerator in known._get_foreach_kernels_supported_devices()


def _real_meshes() -> AbstractContextManager[Any]:
    """Return a context in which meshes of devices find the place of this rank by real tensors."""

    def with_values(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    changed: dict[str, Any] = {"__init__": with_values(DeviceMesh.__init__)}
    ranks = vars(DeviceMesh).get("mesh")
    if isinstance(ranks, property):
        assert ranks.fget is not None
        changed["mesh"] = property(with_values(ranks.fget))
    patched: AbstractContextManager[Any] = patch.multiple(DeviceMesh, **changed)
    return patched


def _foreach() -> AbstractContextManager[Any]:
    """Return a context in which optimizers step all fake tensors at once by default."""
    return patch.multiple(
        torch_optimizer,
        _get_foreach_kernels_supported_devices=lambda: ["cpu"],
        _foreach_supported_types=[Tensor, nn.Parameter, DTensor, FakeTensor],
    )


def build_components(
    devices: int,
    num_nodes: int,
    precision: str,
    accelerator: str = "cpu",
    *,
    foreach: bool = False,
) -> Components:
    """Return the components of a simulation.

    Args:
        devices: on each node.
        num_nodes: how many nodes.
        precision: its name.
        accelerator: the name of the one that is planned for.
        foreach: whether the optimizer steps all parameters at once; see `has_foreach_kernels`.
    """
    registry = get_registry()
    simulated = SimulatedAccelerator()
    simulated.plans_for, simulated.foreach = accelerator, foreach
    return Components(
        accelerator=simulated,
        precision=registry.find("precision", precision).spec.build(),
        checkpoint_io=registry.find("checkpoint_io", "single_file").spec.build(),
        cluster_environment=registry.find("cluster_environment", "plain").spec.build(),
        devices=tuple(range(devices)),
        num_nodes=num_nodes,
    )


def needs_values(error: BaseException | None) -> bool:
    """Whether an error says that code needs the values, or the memory, of a tensor."""
    while error is not None:
        if isinstance(error, _WITHOUT_VALUES) or _NEEDS_MEMORY.search(str(error)):
            return True
        error = error.__cause__
    return False


def in_an_optimizer(error: BaseException) -> bool:
    """Whether an error comes from the step of an optimizer."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer):
            return True
        trace = trace.tb_next
    return False


class MeasuredState(Optimizer):
    """Keeps as many bytes for each weight as an optimizer with a step that needs values.

    The bytes are measured by a step of the optimizer on a small parameter.

    Args:
        optimizer: the optimizer of the model.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        super().__init__(groups, {})
        with _disable_current_modes():
            small = nn.Parameter(torch.zeros(16, 16))
            small.grad = torch.ones(16, 16)
            taken = inspect.signature(type(optimizer)).parameters
            options = {k: v for k, v in optimizer.defaults.items() if k in taken}
            one = type(optimizer)([small], **options)
            one.step()
            state = [kept for kept in one.state[small].values() if isinstance(kept, Tensor)]
        self.bytes_per_weight = sum(kept.nbytes for kept in state if kept.dim()) / small.numel()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # takes no loss
        """Make the state of each parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and not self.state[weight]:
                    own = getattr(weight, "_local_tensor", weight)
                    size = round(self.bytes_per_weight * own.numel())
                    self.state[weight]["kept"] = torch.empty(size, dtype=torch.uint8)


class _PlannedModule(StepModule):
    """A model whose forward returns the loss."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__(model)
        self.loss = loss

    @property
    def runs_backward(self) -> bool:
        """Always False: the plan runs backward, also for a Module with manual optimization."""
        return False

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Tensor:
        return self.loss(self.module, *args, **kwargs)


class _Found(Exception):
    """Ends a step at the call of the model."""


def example_of(workload: Workload, model: nn.Module) -> Any:
    """Return the arguments of the model's first call in a step, a tuple or a dict; None: unknown.

    The step ends at this call.

    Args:
        workload: the training run.
        model: the model.
    """
    found: list[Any] = []

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(inspect.signature(module.forward).bind(*args, **kwargs))
        raise _Found

    hook = model.register_forward_pre_hook(take, with_kwargs=True)
    with suppress(Exception):  # an error of the user's code is raised again by the step itself
        workload.loss(model, workload.batch())
    hook.remove()
    if not found:
        return None
    return dict(found[0].arguments) if found[0].kwargs else found[0].args


class _Step(TrainStep):
    """The step of a front end without hooks; takes down what each phase of it holds."""

    def __init__(self, strategy: Strategy, prepared: PreparedModel, meter: MemoryMeter) -> None:
        precision = strategy.precision
        self.module, self.meter = prepared.module, meter
        self.context = precision.forward_context() or nullcontext()
        self.convert = precision.input_converter() or (lambda batch: batch)
        self.held: dict[str, PlannedMemory] = {}
        self.phase = ""
        self.moments: tuple[str, ...] = ("",)
        self.peaks: list[tuple[tuple[str, ...], Peak]] = []
        self.sent = self.flops = 0

    def start(self) -> None:
        """Begin a step, and forget the memory of the step before."""
        self.held = {}
        self.meter.note_kept()
        self.sent, self.flops = -self.meter.sent, -self.meter.flops

    def enter(self, phase: str) -> None:
        """End a phase of the step, and begin the next one; "" is after the last."""
        meter = self.meter
        if self.phase == "forward":
            meter.note_activations()
        self.peaks.append((self.moments, meter.take_peak()))
        meter.close()
        for moments, peak in self.peaks:
            for moment in moments:
                self._note_moment(moment, peak)
        self.phase, self.moments, self.peaks = phase, ("",), []
        meter.start()
        if not phase:
            self.sent += meter.sent
            self.flops += meter.flops

    def enter_moment(self, phase: str, moments: tuple[str, ...]) -> None:
        """End a moment, and begin the next one; layers that run again in backward begin none."""
        if self.phase == phase:
            self.peaks.append((self.moments, self.meter.take_peak()))
            self.moments = moments

    def _note_moment(self, moment: str, peak: Peak) -> None:
        if self.phase:
            self._note(named(self.phase, moment), peak.size, self.meter.parts_of(peak.sizes))
        if peak.scatter:
            # By itself: with more layers it grows by something else than the rest of a phase.
            parts = self.meter.parts_of(peak.scatter_sizes)
            self._note(named("scatter", moment), peak.scatter, parts)

    def _note(self, phase: str, peak: int, parts: Mapping[Kind, int]) -> None:
        known = {kind: parts.get(kind, 0) for kind in _KINDS}
        memory = PlannedMemory(
            **known,
            working=max(0, peak - sum(known.values())),
            activations=parts.get("activations", 0),
            communication=parts.get("communication", 0),
        )
        before = self.held.get(phase, memory)
        self.held[phase] = max(before, memory, key=_total)

    def begin(self, micro_batch: Any) -> Any:
        self.enter("forward")
        self.meter.note_inputs(tree_leaves(micro_batch))
        return self.convert(micro_batch)

    def loss(self, part: Any, *, converted: bool = False) -> Tensor:
        with self.context:
            loss: Tensor = self.module("forward", part if converted else self.convert(part))
        return loss

    def before_backward(self, loss: Tensor) -> None:
        self.enter("backward")

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.enter("step")


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Stand in for `nn.Module._apply`, which swaps fake tensors and fails at it.

    Parameters that are shared stay so. Optimizers are made afterwards.
    """
    converted: dict[int, Tensor] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    value = function(parameter)
                if value is not parameter:
                    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
                    part._parameters[name] = converted.setdefault(id(parameter), made)  # type: ignore[assignment]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = converted.setdefault(id(buffer), function(buffer))
    return module


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy with parameters and buffers without values, all of them on the host."""
    copies: dict[int, Tensor] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="cpu")
        copies[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        copies[id(buffer)] = torch.empty_like(buffer, device="cpu")
    return copy.deepcopy(model, dict(copies))


def _with_further_batches(
    few: Mapping[str, PlannedMemory], more: Mapping[str, PlannedMemory], further: int
) -> dict[str, PlannedMemory]:
    """Return the moments with further micro-batches, which add their inputs.

    The second of three is the first that runs beside whole gradients, and is not the last, which
    reduces them. So three hold more than two in other ways too, but not in all moments.

    Args:
        few: the moments with two micro-batches.
        more: the moments with three.
        further: the number of micro-batches.
    """
    known = [name for name in more if name in few]
    inputs = max(0, min(more[name].total - few[name].total for name in known))
    return {
        name: replace(
            more[name],
            working=more[name].working + further * inputs,
            activations=more[name].activations + further * inputs,
            sent=more[name].sent + further * (more[name].sent - few[name].sent),
            flops=more[name].flops + further * (more[name].flops - few[name].flops),
        )
        for name in known
    }


def _with_gradients_up_to(most: int, memory: PlannedMemory) -> PlannedMemory:
    gradients = max(0, min(most, memory.gradients))
    working = max(0, memory.working + memory.gradients - gradients)
    activations = max(0, min(memory.activations, working))
    communication = max(0, min(memory.communication, working - activations))
    return PlannedMemory(
        **{
            **asdict(memory),
            "gradients": gradients,
            "working": working,
            "activations": activations,
            "communication": communication,
        }
    )


def _total(memory: StepMemory) -> int:
    return memory.total


def _known(prepared: PreparedModel, trained: set[int]) -> dict[Kind, Iterable[Tensor]]:
    """Return the tensors of a model by kind; an optimizer's own copies of weights are its state."""
    parameters = list(prepared.original.parameters())
    optimizer: list[Tensor] = []
    for one in prepared.optimizers:
        for state in one.state.values():
            optimizer += [value for value in state.values() if isinstance(value, Tensor)]
        for group in one.param_groups:
            optimizer += [weight for weight in group["params"] if id(weight) not in trained]
    return {
        "optimizer": optimizer,
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "buffers": list(prepared.original.buffers()),
    }


def _outermost_lists(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Sequential) and _has_equal_layers(model):
        yield "", model
        return
    for name, part in model.named_children():
        if isinstance(part, (nn.ModuleList, nn.Sequential)):
            yield name, part
        else:
            yield from ((f"{name}.{inner}", found) for inner, found in _outermost_lists(part))


def _has_equal_layers(part: nn.Module) -> bool:
    layers = list(part.children())
    return len(layers) > _FEWEST and len({_shape_of(layer) for layer in layers}) == 1


def _shape_of(layer: nn.Module) -> tuple[Any, ...]:
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return type(layer), tuple((name, tuple(t.shape), t.requires_grad) for name, t in tensors)
