"""plan_memory: what each installed strategy holds in memory, whether it fits, and what to write."""

from __future__ import annotations

import gc
import inspect
import logging
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from stratagem.accelerators import CPUAccelerator
from stratagem.discovery import StrategySpec, get_registry
from stratagem.errors import ConfigurationError, UserCodeError, format_names, format_text
from stratagem.strategies import ActivationCheckpointing, Components, StepMemory, Strategy
from stratagem_extras.planner.choices import (
    Choice,
    SizesJob,
    candidates,
    check_names,
    class_of,
    installed_choices,
    named_choices,
    with_arguments,
)
from stratagem_extras.planner.devices import Device, find_device, parse_size, with_figures
from stratagem_extras.planner.forks import Divide, in_turn
from stratagem_extras.planner.modules import ModuleMemory, ModuleWatch
from stratagem_extras.planner.moments import by_phase
from stratagem_extras.planner.simulation import (
    MeasuredState,
    PlannedMemory,
    SimulatedModel,
    Workload,
    build_components,
    has_foreach_kernels,
    in_an_optimizer,
    needs_values,
    simulated_group,
    simulated_ranks,
)
from stratagem_extras.planner.training import default_loss, first_batch, optimizer_maker

_log = logging.getLogger(__name__)

_EFFICIENCY = 0.4
"""The part of a device's floating-point operations that large models reach."""
_TO_HOST = 25e9
"""Bytes a second between a device and its host, over PCI Express 4."""
_TO_DISK = 6e9
"""Bytes a second between a node and its NVMe device, over PCI Express 4."""
_LIKE = find_device("A100-80GB")
"""The device by which sizes are compared on one whose figures are unknown."""
_DEDICATED = ("tpu", "hpu", "ipu")
"""Accelerators whose `requires_dedicated_strategies` is True, also where none is installed."""
_LIBRARIES = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
"""Folders of code that is not the user's."""
_NUMBER = re.compile(r"\d+")
_LAUNCHERS = ("launcher", "find_unused_parameters")
"""Preset arguments by which memory does not differ."""


@dataclass(frozen=True)
class PlannedStrategy:
    """The memory use of a strategy.

    Attributes:
        name: the name of the strategy.
        alike: names of strategies with the same memory use.
        shards: the tensors that the strategy divides between ranks.
        memory: the memory of one rank, in its device and host together, at their common peak; None:
            unknown.
        device: the memory of one rank in its device alone, at the device's peak.
        how: "simulated": the strategy's own step was run; "computed": by the strategy's
            `estimate_memory`, from a step in one process, or by its `propose`.
        why_not: the reason why the memory is unknown, or the strategy unavailable; "".
        on_host: bytes of a rank in the host's memory.
        on_disk: bytes of a rank on the disk to which the strategy offloads.
        fits: whether a rank fits in the device, and the ranks of a node in the host and on the
            disk.
        seconds: the approximate time of a step; None: the device's figures are unknown.
        ranks_of_batch: the number of ranks that read the same batches. Rows are sorted by the time
            of a step times this number.
        waits: the time in which a rank waits for other stages of a pipeline, over that in which it
            computes.
        cost: seconds of all ranks that read a batch, by which rows are sorted, if a strategy has
            proposed its sizes; None: by `seconds` times `ranks_of_batch`.
        reasons: a sentence for each size that a strategy has proposed.
        expression: the argument of `Trainer(strategy=...)` in Python; "": the name.
        import_line: the import that the expression needs; "".
    """

    name: str
    alike: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    memory: PlannedMemory | None = None
    device: PlannedMemory | None = None
    how: str = ""
    why_not: str = ""
    on_host: int = 0
    on_disk: int = 0
    fits: bool = False
    seconds: float | None = None
    ranks_of_batch: int = 1
    waits: float = 0.0
    cost: float | None = None
    reasons: tuple[str, ...] = ()
    expression: str = ""
    import_line: str = ""

    @property
    def on_device(self) -> int:
        """Bytes of a rank in its device."""
        return 0 if self.device is None else self.device.total


@dataclass(frozen=True)
class MemoryPlan:
    """The result of `plan_memory`.

    Attributes:
        strategies: strategies that fit come first, the fastest before the others.
        parameters: the number of parameters of the model.
        devices: the number of devices on each node.
        num_nodes: the number of nodes.
        capacity: bytes of a device.
        host: bytes of the host's memory on each node; None: unknown, and not compared.
        disk: bytes of the disk on each node; None: not compared.
        precision, accumulate_grad_batches: the planned values.
        accelerator: the accelerator of the device, "auto" for this machine's.
        notes: unknown facts of the plan, a sentence each.
        modules: the parts of the model in the order of calls: elements of lists of modules, and
            outermost modules. Their parameters and activations add up to a step in one process.
            Empty if activations are unknown.
    """

    strategies: tuple[PlannedStrategy, ...]
    parameters: int
    devices: int
    num_nodes: int
    capacity: int
    host: int | None
    disk: int | None
    precision: str
    accumulate_grad_batches: int
    accelerator: str
    notes: tuple[str, ...] = ()
    modules: tuple[ModuleMemory, ...] = ()

    @property
    def best(self) -> PlannedStrategy | None:
        """The first strategy that fits, or None."""
        return next((row for row in self.strategies if row.fits), None)

    @property
    def best_doubled(self) -> PlannedStrategy | None:
        """The first strategy that fits twice the model and activations, or None."""
        host = None if self.host is None else self.host // 2
        disk = None if self.disk is None else self.disk // 2
        return self.best_within(self.capacity // 2, host, disk)

    def best_within(
        self, capacity: int, host: int | None, disk: int | None = None
    ) -> PlannedStrategy | None:
        """Return the first strategy that fits in less memory than the plan's, or None.

        Args:
            capacity: bytes of a device.
            host: bytes of the host's memory on each node; None: not compared.
            disk: bytes of the disk on each node; None: not compared.
        """
        device = Device("", self.accelerator, capacity)
        machines = _Machines(device, self.devices, self.num_nodes, host, disk)
        rows = (row for row in self.strategies if row.memory is not None)
        return next(filter(machines.fit, rows), None)

    @property
    def call(self) -> str:
        """The Trainer to write, with the import of a strategy with sizes; "": nothing fits."""
        best = self.best
        if best is None:
            return ""
        options = {
            "accelerator": self.accelerator,
            "devices": self.devices,
            "num_nodes": self.num_nodes if self.num_nodes > 1 else None,
            "strategy": best.name,
            "precision": self.precision if self.precision != "32-true" else None,
            "accumulate_grad_batches": (
                self.accumulate_grad_batches if self.accumulate_grad_batches > 1 else None
            ),
        }
        given = {k: repr(v) for k, v in options.items() if v is not None}
        if best.expression:
            given["strategy"] = best.expression
        line = f"{best.import_line}\n\n" if best.import_line else ""
        return f"{line}Trainer({', '.join(f'{k}={v}' for k, v in given.items())})"


def plan_memory(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    precision: str = "32-true",
    devices: int = 1,
    num_nodes: int = 1,
    device: str | None = None,
    device_memory: float | str | None = None,
    figures: Mapping[str, float] | None = None,
    host_memory: float | str | None = None,
    disk_memory: float | str | None = None,
    accumulate_grad_batches: int = 1,
    activation_checkpointing: ActivationCheckpointing = None,
    strategies: Sequence[str] = (),
) -> MemoryPlan:
    """Return the memory use of each installed strategy, without using that memory.

    A strategy's own step runs on fake tensors as rank 0 of the requested ranks. If its engine does
    not support this, a step in one process is measured instead, and divided according to the
    strategy's spec. Bytes count tensors only: an allocator's reserve and memory of libraries come
    on top, so that a plan fills at most 90% of a device.

    Args:
        model: a function or a class that builds it, or the model itself, which is not changed. Pass
            a function for a model that is too large for this machine.
        batch: a micro-batch of one rank, as tensors, as a function that returns the batch, or a
            loader, which provides its first batch.
        loss: returns the loss of a model and a batch; None: the return value of `training_step`,
            else the output's `loss`, else the mean of its first tensor.
        optimizer: a class of `torch.optim` by name, or a function of the parameters; None: the
            return value of `configure_optimizers`, else AdamW.
        precision: as for `Trainer`.
        devices: the number of devices on each node.
        num_nodes: the number of nodes.
        device: a name from the table of devices, such as "A100-80GB"; None: this machine's device.
        device_memory: memory of a device, in bytes or as "80GB"; None: the memory of `device`.
        figures: figures of the device in place of the table's: "flops", operations a second
            in bfloat16; "link" and "network", bytes a second to a device of its node and of another
            one.
        host_memory: host memory of a node; None: this machine's, or not compared if `device` names
            another machine's.
        disk_memory: size of the disk of a node to which strategies offload; None: not compared.
        accumulate_grad_batches: micro-batches in an optimizer step.
        activation_checkpointing: as for `FSDPStrategy`, here under every strategy: True computes
            the activations of layers again in backward.
        strategies: names of strategies; by default all installed strategies. A name may have
            arguments, `"mesh(tensor=2, context=2)"`. A name without parentheses is planned with
            the sizes that its class proposes too. By default sizes are planned if no strategy fits
            on the devices alone.

    Raises:
        ConfigurationError: an argument is invalid, or the model cannot be built or run without
            values.

    Example:
        >>> import torch
        >>> from stratagem import plan_memory
        >>> plan = plan_memory(lambda: torch.nn.Linear(1000, 1000), torch.zeros(8, 1000),
        ...                    devices=2, device_memory="1GB", strategies=["ddp", "fsdp"])
        >>> [row.name for row in plan.strategies if row.fits], plan.parameters
        (['ddp', 'fsdp'], 1001000)
    """
    check_names(strategies)
    planner = Planner(
        model,
        batch,
        loss=loss,
        optimizer=optimizer,
        precision=precision,
        accumulate_grad_batches=accumulate_grad_batches,
        activation_checkpointing=activation_checkpointing,
    )
    return planner.plan(
        devices=devices,
        num_nodes=num_nodes,
        device=device,
        device_memory=device_memory,
        figures=figures,
        host_memory=host_memory,
        disk_memory=disk_memory,
        strategies=strategies,
    )


@contextmanager
def _planning() -> Iterator[None]:
    """Keep quiet, and let collections of garbage, which engines ask for, pass over older objects.

    Models that are not really trained cause warnings, and strategies report what they do. Torch
    logs errors of operations on fake tensors, which are raised too.
    """
    freezes = not gc.get_freeze_count()  # else the caller has done so already
    if freezes:
        gc.freeze()
    try:
        with (
            _silent("torch._subclasses.fake_tensor"),
            _silent("stratagem"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        if freezes:
            gc.unfreeze()


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Drop the messages of a logger, also if it has no handler and they would be printed."""
    log = logging.getLogger(name)
    before, log.disabled = log.disabled, True
    log.addHandler(handler := logging.NullHandler())
    try:
        yield
    finally:
        log.disabled = before
        log.removeHandler(handler)


def _simulated(
    model: nn.Module | Callable[[], nn.Module], checkpointing: ActivationCheckpointing
) -> SimulatedModel:
    try:
        return SimulatedModel(model, checkpointing)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the model cannot be built without memory: {_at(error)}. Build it without reading "
            "files or values of tensors, or plan its sizes: --parameters, --layers, --hidden"
        ) from error


@dataclass(frozen=True)
class _Machines:
    """The machines of a plan.

    Attributes:
        device: the device; each node has `devices` of this kind.
        devices: the number of devices on each node.
        nodes: the number of nodes.
        host, disk: bytes of a node; None: not compared.
    """

    device: Device
    devices: int
    nodes: int
    host: int | None
    disk: int | None

    @property
    def kind(self) -> str:
        """The name of the accelerator; "auto" where only the memory is known."""
        return self.device.accelerator

    @property
    def planned_for(self) -> str:
        """The name of the accelerator; a device of which only the memory is known is a GPU."""
        return "cuda" if self.kind == "auto" else self.kind

    def foreach(self, offloads: Sequence[str] = ()) -> bool:
        """Whether torch's optimizers step all parameters at once, with this state offloaded."""
        return "optimizer" not in offloads and has_foreach_kernels(self.planned_for)

    def fit(self, row: PlannedStrategy) -> bool:
        """Whether a rank fits in its device, and those of a node in its host and on its disk."""
        places = (
            (row.on_device, self.device.memory),
            (row.on_host * self.devices, self.host),
            (row.on_disk * self.devices, self.disk),
        )
        return all(size is None or held <= StepMemory.USABLE * size for held, size in places)


class Planner:
    """Plans one model for one machine after the other.

    Args:
        model, batch, loss, optimizer, precision, accumulate_grad_batches, activation_checkpointing:
            as for `plan_memory`.

    Raises:
        ConfigurationError: as `plan_memory`.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        batch: Any,
        *,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        precision: str = "32-true",
        accumulate_grad_batches: int = 1,
        activation_checkpointing: ActivationCheckpointing = None,
    ) -> None:
        _check_numbers(accumulate_grad_batches=accumulate_grad_batches)
        self.precision = precision
        self.workload = Workload(
            batch if callable(batch) else partial(first_batch, batch),
            loss or default_loss,
            optimizer_maker(optimizer),
            accumulate_grad_batches,
        )
        self.notes: tuple[str, ...] = ()
        self.has_activations = True
        """Whether a step of the model can be run without values."""
        self.modules: tuple[ModuleMemory, ...] = ()
        """The parts of the model, after the first plan."""
        self._steps: dict[Any, dict[str, PlannedMemory]] = {}
        """The moments of simulated steps, by all that they depend on."""
        self._steps_alone: dict[bool, dict[str, PlannedMemory]] = {}
        """Steps in one process, by whether the optimizer steps all parameters at once."""
        with _planning():
            self.model = _simulated(model, activation_checkpointing)

    def plan(
        self,
        *,
        devices: int = 1,
        num_nodes: int = 1,
        device: str | None = None,
        device_memory: float | str | None = None,
        figures: Mapping[str, float] | None = None,
        host_memory: float | str | None = None,
        disk_memory: float | str | None = None,
        strategies: Sequence[str] = (),
        expand: bool = True,
        divide: Divide = in_turn,
    ) -> MemoryPlan:
        """Return the plan for a machine; see `plan_memory`.

        Args:
            devices, num_nodes, device, device_memory, figures: as for `plan_memory`.
            host_memory, disk_memory, strategies: as for `plan_memory`.
            expand: whether to plan sizes that strategies propose.
            divide: runs the simulations.
        """
        _check_numbers(devices=devices, num_nodes=num_nodes)
        host = None if host_memory is None else parse_size(host_memory)
        if host is None and device is None:
            host = _host_memory()
        disk = None if disk_memory is None else parse_size(disk_memory)
        found = with_figures(_device(device, device_memory, devices), figures or {})
        machines = _Machines(found, devices, num_nodes, host, disk)
        with _planning():
            flops = max(memory.flops for memory in self._alone(machines.foreach()).values())
            if strategies:
                named = named_choices(
                    strategies,
                    lambda choice, given: (
                        self._sizes(choice, machines, divide, given) if expand else []
                    ),
                )
                judged = self._judged_rows(named, machines, flops, divide)
            else:
                judged = self._rows_of_installed(machines, flops, divide, expand=expand)
        if devices * num_nodes > 1:
            judged = [row for row in judged if row.name != "single_device"]
        return MemoryPlan(
            tuple(sorted(judged, key=_cost)),
            sum(p.numel() for p in self.model.model.parameters()),
            devices,
            num_nodes,
            found.memory,
            host,
            disk,
            self.precision,
            self.workload.micro_batches,
            found.accelerator,
            self.notes,
            self.modules,
        )

    def _rows_of_installed(
        self, machines: _Machines, flops: int, divide: Divide, *, expand: bool
    ) -> list[PlannedStrategy]:
        """Return the rows of all strategies; candidates if nothing fits on the devices alone."""
        installed = installed_choices(_groups())
        rows = self._rows(installed, machines, divide)
        rows = _without_copies(rows, [choice.spec for choice in installed])
        judged = [_judged(row, machines, flops) for row in rows]
        if expand and not any(row.fits and not row.on_host and not row.on_disk for row in judged):
            lists = [self._sizes(each, machines, divide) for each in installed]
            known = {row.name for row in judged}
            more = [choice for choice in chain(*lists) if choice.name not in known]
            judged += self._judged_rows(more, machines, flops, divide)
        return judged

    def _sizes(
        self,
        choice: Choice,
        machines: _Machines,
        divide: Divide,
        named: Sequence[Mapping[str, Any]] = (),
    ) -> list[Choice]:
        """Return the sizes of a strategy: those that it proposes for the model, or candidates."""
        kind, ranks = class_of(choice.spec), machines.devices * machines.nodes
        if choice.arguments or not self.has_activations or ranks == 1 or not _can_propose(kind):
            return candidates(choice, machines.devices, machines.nodes)
        try:
            proposals = kind.propose(self._job(choice, machines, divide, named))
        except Exception as error:
            _log.debug("%s proposes no sizes: %s", choice.name, error)
            return candidates(choice, machines.devices, machines.nodes)
        return [
            replace(with_arguments(choice, each.arguments), is_candidate=True, proposal=each)
            for each in proposals
        ]

    def _job(
        self,
        choice: Choice,
        machines: _Machines,
        divide: Divide,
        named: Sequence[Mapping[str, Any]] = (),
    ) -> SizesJob:
        known = machines.device if machines.device.flops else _LIKE
        return SizesJob(
            machines.devices,
            machines.nodes,
            int(StepMemory.USABLE * machines.device.memory),
            known,
            _EFFICIENCY * known.flops,
            self.workload.micro_batches,
            self.model.model,
            self.modules,
            self._converted(),
            named,
            partial(self._moments_of, choice, machines, divide),
            partial(self._refusal_of, choice, machines),
        )

    def _converted(self) -> int:
        """Return the bytes of the tensors of a batch that the precision makes anew."""
        convert = build_components(1, 1, self.precision).precision.input_converter()
        if convert is None:
            return 0
        with self.model.mode:
            batch = self.workload.batch()
            given = set(map(id, tree_leaves(batch)))
            made = [leaf for leaf in tree_leaves(convert(batch)) if id(leaf) not in given]
        return sum(t.numel() * t.element_size() for t in made if isinstance(t, Tensor))

    def _refusal_of(
        self,
        choice: Choice,
        machines: _Machines,
        arguments: Mapping[str, int],
        devices: int,
        num_nodes: int,
    ) -> str:
        """Return why a strategy refuses arguments, by a step with few layers; ""."""
        spec = with_arguments(choice, arguments).spec
        these = replace(machines, devices=devices, nodes=num_nodes)
        components = self._components_of(spec, these)
        others = [0]
        try:
            while others:
                rank = others.pop()
                with simulated_ranks(strategy := spec.build(), components, rank):
                    if rank == 0:
                        others = list(getattr(strategy, "unequal_ranks", ()))[1:]
                    self.model.simulate_few_layers(strategy, self.workload)
        except Exception as error:
            return format_text(str(error), 400)
        return ""

    def _moments_of(
        self,
        choice: Choice,
        machines: _Machines,
        divide: Divide,
        arguments: Sequence[Mapping[str, int]],
        devices: int,
        num_nodes: int,
    ) -> list[dict[str, PlannedMemory] | str]:
        """Return the moments of simulated steps of a strategy, or why it refuses arguments."""
        these = replace(machines, devices=devices, nodes=num_nodes)
        specs = [with_arguments(choice, each).spec for each in arguments]

        def piece(number: int) -> dict[str, PlannedMemory] | str:
            try:
                return self._simulated(specs[number], these)[1]
            except Exception as error:
                return format_text(str(error), 400)

        done = divide(len(specs), piece)
        for spec, moments in zip(specs, done, strict=True):
            if not isinstance(moments, str):  # a fork has simulated it
                self._steps.setdefault(self._key_of(spec, these), moments)
        return done

    def _judged_rows(
        self, choices: Sequence[Choice], machines: _Machines, flops: int, divide: Divide
    ) -> list[PlannedStrategy]:
        rows = self._rows(choices, machines, divide)
        return [_judged(row, machines, flops) for row in _with_refusals_once(choices, rows)]

    def _alone(self, foreach: bool) -> dict[str, PlannedMemory]:
        """Return the phases of a step in one process."""
        if foreach not in self._steps_alone:
            model = self.model
            simulate = self._simulate_step if self.has_activations else model.simulate_state
            try:
                phases = self._in_one_process(simulate, foreach)
            except ConfigurationError:
                raise
            except Exception as error:
                phases = self._without_values(error, foreach)
            if not self._steps_alone:
                reads = model.mode.reads
                self.notes += tuple(f"{place} reads a value of a tensor: 1 here" for place in reads)
            self._steps_alone[foreach] = phases
        return self._steps_alone[foreach]

    def _simulate_step(self, strategy: Strategy, workload: Workload) -> dict[str, PlannedMemory]:
        """Return the phases of a step in one process, and take down the parts of the model."""
        watch = ModuleWatch(self.model.stacks)
        moments = self.model.simulate_step(strategy, workload, watch)
        self.modules = watch.rows
        return by_phase(moments)

    def _without_values(self, error: Exception, foreach: bool) -> dict[str, PlannedMemory]:
        """Return the phases of a step in one process, without what has raised an error."""
        if measures := in_an_optimizer(error):
            make = self.workload.optimizer
            self.workload = replace(self.workload, optimizer=lambda m: MeasuredState(make(m)))
            self.notes = (
                "the state of the optimizer was measured by a step on a small parameter, since "
                f"values are needed: {_at(error)}",
            )
            try:
                return self._in_one_process(self._simulate_step, foreach)
            except Exception as other:
                error = other
        if in_an_optimizer(error) or not needs_values(error):
            raise ConfigurationError(
                f"a step of the model cannot be run without values: {_at(error)}. Check that the "
                "batch fits the model. A Module that needs a Trainer can be planned by "
                "plan_memory(..., loss=..., optimizer=...)"
            ) from error
        self.has_activations = False
        self.notes += (f"activations are not counted, since values are needed: {_at(error)}",)
        try:
            return self._in_one_process(self.model.simulate_state, foreach)
        except Exception as other:
            if measures or not in_an_optimizer(other):
                raise
            return self._without_values(other, foreach)

    def _rows(
        self, choices: Sequence[Choice], machines: _Machines, divide: Divide
    ) -> list[PlannedStrategy]:
        """Return the memory use of strategies; those that share a simulation are one piece."""
        pieces: dict[str, list[int]] = {}
        for number, choice in enumerate(choices):
            pieces.setdefault(_simulated_as(choice.spec), []).append(number)
        # Strategies that shard most take longest, and come first.
        order = sorted(pieces.values(), key=lambda piece: -len(choices[piece[0]].spec.shards))
        done = divide(
            len(order), lambda piece: [self._row(choices[n], machines) for n in order[piece]]
        )
        rows = dict(zip(chain(*order), chain(*done), strict=True))
        return [rows[number] for number in range(len(choices))]

    def _row(self, choice: Choice, machines: _Machines) -> PlannedStrategy:
        """Return the memory use of a strategy under its name with arguments."""
        said = choice.proposal
        if said is not None and said.why_not:
            return PlannedStrategy(choice.name, why_not=said.why_not)
        if said is None or said.is_simulated:
            row = self._row_of_spec(choice, machines)
        else:
            row = _row_of_proposal(said)
        if row.memory is None:
            return replace(row, name=choice.name)
        line, expression = choice.in_python()
        row = replace(row, name=choice.name, import_line=line, expression=expression)
        if said is None:
            return row
        seconds = said.seconds if machines.device.flops else None
        return replace(row, seconds=seconds, cost=said.cost, reasons=said.reasons)

    def _row_of_spec(self, choice: Choice, machines: _Machines) -> PlannedStrategy:
        spec, alike = choice.spec, choice.alike
        gc.freeze()  # keep existing objects out of the collector
        capabilities, ranks = spec.capabilities, machines.devices * machines.nodes
        runs_on = capabilities.accelerators
        kind = "cpu" if machines.kind == "auto" else machines.kind
        if runs_on is not None and kind not in runs_on:
            why = f"runs on {format_names(sorted(runs_on))}, not on {kind}"
            return PlannedStrategy(spec.name, alike, why_not=why)
        if runs_on is None and kind in _DEDICATED:
            why = f"a {kind} takes strategies that were made for it alone"
            return PlannedStrategy(spec.name, alike, why_not=why)
        how = "simulated" if self.has_activations else "computed"
        offloads = spec.offloads if machines.kind != "cpu" else ()  # a CPU offloads to itself
        foreach = self._steps_foreach(spec, machines)
        largest = max(parameter.numel() for parameter in self.model.model.parameters())
        row = partial(_row_of, spec, alike, offloads, largest)
        if spec.name == "single_device":
            return row(spec.build(), self._alone(foreach), how)
        if capabilities.one_process and ranks > 1:
            why = "one process drives all devices, which cannot be simulated"
            return PlannedStrategy(spec.name, alike, why_not=why)
        components = self._components_of(spec, machines)
        try:
            if self.has_activations:
                strategy, moments, sharing = self._simulated(spec, machines)
                share = getattr(strategy, "waiting_share", lambda micro_batches: 0.0)
                waits = share(self.workload.micro_batches)
                made = row(strategy, by_phase(moments), how)
                return replace(made, ranks_of_batch=sharing, waits=waits)
        except (ConfigurationError, UserCodeError) as error:
            return PlannedStrategy(spec.name, alike, why_not=format_text(str(error), 400))
        # Strategies that need real tensors, such as DistributedDataParallel, are computed instead.
        except Exception as error:
            _log.debug("%s cannot be simulated: %s", choice.name, error)
            if choice.has_sizes:  # an estimate knows of no sizes
                why = format_text(f"{type(error).__name__}: {error}", 200)
                return PlannedStrategy(spec.name, alike, why_not=why)
        if choice.has_sizes:
            why = "the sizes are planned by a step, and a step of the model needs values"
            return PlannedStrategy(spec.name, alike, why_not=why)
        alone = self._alone(foreach)
        try:
            with simulated_group(components):
                (strategy := spec.build()).bind(components)
                phases = self._estimated(strategy, spec, alone, foreach)
        except Exception as error:
            why = format_text(f"{type(error).__name__}: {error}", 200)
            return PlannedStrategy(spec.name, alike, why_not=why)
        return row(strategy, phases, "computed")

    def _components_of(self, spec: StrategySpec, machines: _Machines) -> Components:
        where = machines.devices, machines.nodes, self.precision, machines.planned_for
        return build_components(*where, foreach=self._steps_foreach(spec, machines))

    def _steps_foreach(self, spec: StrategySpec, machines: _Machines) -> bool:
        # A CPU offloads to itself.
        return machines.foreach(spec.offloads if machines.kind != "cpu" else ())

    def _key_of(self, spec: StrategySpec, machines: _Machines) -> Any:
        where = machines.devices, machines.nodes, machines.planned_for
        return _simulated_as(spec), *where, self._steps_foreach(spec, machines)

    def _simulated(
        self, spec: StrategySpec, machines: _Machines
    ) -> tuple[Strategy, dict[str, PlannedMemory], int]:
        """Return a strategy, the moments of its step, and the number of ranks of a batch."""
        key, components = self._key_of(spec, machines), self._components_of(spec, machines)
        found: list[dict[str, PlannedMemory]] = []
        with simulated_ranks(strategy := spec.build(), components):
            unequal = getattr(strategy, "unequal_ranks", ())
            if key not in self._steps:
                found.append(self.model.simulate_step(strategy, self.workload))
            sharing = machines.devices * machines.nodes // len(strategy.ranks.data_groups)
        if found:
            for rank in unequal[1:]:
                with simulated_ranks(other := spec.build(), components, rank):
                    found.append(self.model.simulate_step(other, self.workload))
            self._steps[key] = _fullest(found)
        return strategy, self._steps[key], sharing

    def _estimated(
        self,
        strategy: Strategy,
        spec: StrategySpec,
        alone: dict[str, PlannedMemory],
        foreach: bool,
    ) -> dict[str, PlannedMemory]:
        """Return a strategy's estimate; what it adds to a step in one process is communication."""
        estimated = strategy.estimate_memory(alone, spec.shards)
        phases = {}
        for phase, memory in estimated.items():
            before = alone[phase]
            made = PlannedMemory(**{**asdict(before), **asdict(memory)})
            more = max(0, made.working - before.working)
            phases[phase] = replace(made, communication=before.communication + more)
        share = getattr(strategy, "largest_share", None)
        return phases if share is None else self._unevenly(share, phases, alone, foreach)

    def _unevenly(
        self,
        share: Callable[[Iterable[int]], float],
        phases: dict[str, PlannedMemory],
        alone: dict[str, PlannedMemory],
        foreach: bool,
    ) -> dict[str, PlannedMemory]:
        """Return the estimate for the rank that steps most parameters.

        A strategy that keeps each parameter's state on one rank says by a method `largest_share`
        which part the fullest one has. It has the largest parameter, whose temporary tensors are
        the largest too. If the optimizer steps all parameters at once, these have that part.
        """
        trained = [p.numel() for p in self.model.model.parameters() if p.requires_grad]
        part = share(trained)
        together = self._steps_all_at_once(foreach)
        made = {}
        for phase, memory in phases.items():
            state = round(part * alone[phase].optimizer)
            less = round((1 - part) * memory.temporary) if together and phase == "step" else 0
            made[phase] = replace(memory, optimizer=state, working=memory.working - less)
        return made

    def _steps_all_at_once(self, foreach: bool) -> bool:
        """Whether the optimizer does so, where `foreach` is the default of its device."""
        with self.model.mode:
            options = self.workload.optimizer(self.model.model).defaults
        chosen = options.get("foreach")
        return bool(foreach and not options.get("fused") if chosen is None else chosen)

    def _in_one_process(
        self, simulate: Callable[[Strategy, Workload], dict[str, PlannedMemory]], foreach: bool
    ) -> dict[str, PlannedMemory]:
        strategy: Strategy = get_registry().find("strategy", "single_device").spec.build()
        components = build_components(1, 1, self.precision, foreach=foreach)
        with simulated_ranks(strategy, components):
            return simulate(strategy, self.workload)


def _check_numbers(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name}={value!r}: expected a whole number of at least 1")


def _simulated_as(spec: StrategySpec) -> str:
    """Return what a simulation of a strategy depends on: it keeps all tensors in the host."""
    options = {k: v for k, v in _options(spec).items() if k not in spec.placement_arguments}
    return f"{spec.target}({options!r})"


def _row_of(
    spec: StrategySpec,
    alike: tuple[str, ...],
    offloads: Sequence[str],
    largest: int,
    strategy: Strategy,
    phases: dict[str, PlannedMemory],
    how: str,
) -> PlannedStrategy:
    """Return a row for the moments at which a rank, and its device, hold most.

    A strategy says by a method `kept_on_device` how many bytes of an offloaded optimizer's state
    are on the device, for a model whose largest parameter has so many elements.
    """
    on_device = getattr(strategy, "kept_on_device", lambda largest: 0)(largest)
    # Parameters gathered for a step are on the device.
    kept = min(memory.parameters for memory in phases.values())

    def off(memory: PlannedMemory) -> dict[str, int]:
        held = {part: getattr(memory, part) for part in offloads}
        if "optimizer" in held:
            held["optimizer"] = max(0, held["optimizer"] - on_device)
        return {**held, "parameters": kept} if "parameters" in held else held

    def device(memory: PlannedMemory) -> PlannedMemory:
        rest = {part: getattr(memory, part) - size for part, size in off(memory).items()}
        return replace(memory, **rest)

    places = [_host_and_disk(strategy, off(memory)) for memory in phases.values()]
    return PlannedStrategy(
        spec.name,
        alike,
        spec.shards,
        max(phases.values(), key=_total),
        max(map(device, phases.values()), key=_total),
        how,
        on_host=max(host for host, _ in places),
        on_disk=max(disk for _, disk in places),
    )


def _fullest(ranks: Sequence[dict[str, PlannedMemory]]) -> dict[str, PlannedMemory]:
    """Return the moments of the rank that holds most, with the work of those that do most."""
    fullest = max(ranks, key=lambda moments: max(memory.total for memory in moments.values()))
    every = [memory for moments in ranks for memory in moments.values()]
    sent, flops = max(memory.sent for memory in every), max(memory.flops for memory in every)
    return {name: replace(memory, sent=sent, flops=flops) for name, memory in fullest.items()}


def _row_of_proposal(proposal: Any) -> PlannedStrategy:
    """Return a row of what a strategy says of sizes that cannot be simulated."""
    held = {part: round(size) for part, size in proposal.memory.items()}
    working = sum(held.pop(part) for part in ("activations", "communication", "temporary"))
    held = {**held, "activations": round(proposal.memory["activations"])}
    held["communication"] = round(proposal.memory["communication"])
    memory = PlannedMemory(**held, working=working)
    return PlannedStrategy(
        "", memory=memory, device=memory, how="computed", ranks_of_batch=proposal.ranks_of_batch
    )


def _can_propose(kind: Any) -> bool:
    """Whether a strategy proposes sizes for a model, by a class method `propose`."""
    return hasattr(kind, "propose")


def _host_and_disk(strategy: Strategy, offloaded: dict[str, int]) -> tuple[int, int]:
    """Return the bytes that a rank has in its host and on its disk, of what it offloads.

    A strategy that offloads to a disk says so by a method `split_offload`.
    """
    split = getattr(strategy, "split_offload", None)
    if split is None or not any(offloaded.values()):
        return sum(offloaded.values()), 0
    host, disk = split(offloaded)
    return int(host), int(disk)


def _total(memory: PlannedMemory) -> int:
    return memory.total


def _groups() -> list[list[StrategySpec]]:
    """Return the installed strategies, in lists of those that hold the same."""
    groups: dict[Any, list[StrategySpec]] = {}
    for candidate in get_registry().candidates("strategy"):
        spec = candidate.spec
        if isinstance(spec, StrategySpec):
            key = str(spec.target), spec.shards, spec.offloads, repr(_options(spec))
            groups.setdefault(key, []).append(spec)
    return list(groups.values())


def _with_refusals_once(
    choices: Sequence[Choice], rows: Sequence[PlannedStrategy]
) -> list[PlannedStrategy]:
    """Return rows in which candidates that a model refuses for one reason share a row."""
    refused: dict[str, PlannedStrategy] = {}
    kept: list[PlannedStrategy] = []
    for choice, row in zip(choices, rows, strict=True):
        if row.memory is None and choice.is_candidate:
            reason = f"{choice.spec.name}: {_NUMBER.sub('0', row.why_not)}"
            first = refused.setdefault(reason, row)
            if first is not row:
                refused[reason] = replace(first, alike=(*first.alike, row.name))
        else:
            kept.append(row)
    return [*kept, *refused.values()]


def _without_copies(
    rows: Sequence[PlannedStrategy], specs: Sequence[StrategySpec]
) -> list[PlannedStrategy]:
    """Return the rows without those of the same class that hold the same as one before."""
    known: dict[Any, PlannedStrategy] = {}
    for row, spec in zip(rows, specs, strict=True):
        held = row.memory, row.device, row.on_host, row.on_disk
        key = (str(spec.target), held) if row.memory else row.name
        first = known.setdefault(key, row)
        if first is not row:
            known[key] = replace(first, alike=(*first.alike, row.name, *row.alike))
    return list(known.values())


def _options(spec: StrategySpec) -> dict[str, Any]:
    """Return the arguments that matter for memory, without those that have their defaults."""
    options = {k: v for k, v in sorted(spec.init_args.items()) if k not in _LAUNCHERS}
    try:
        known = inspect.signature(spec.load()).parameters
    except Exception:  # a package is missing, which its row will say
        return options
    return {k: v for k, v in options.items() if k not in known or known[k].default != v}


def _judged(row: PlannedStrategy, machines: _Machines, flops: int) -> PlannedStrategy:
    if row.memory is None:
        return row
    seconds = row.seconds
    device = machines.device
    if device.flops and row.cost is None:
        ranks = machines.devices * machines.nodes
        link = device.between(machines.devices, machines.nodes)
        sent = row.memory.sent * (ranks - 1) / ranks / link if ranks > 1 else 0.0
        if row.ranks_of_batch > 1:  # they divide the work of a batch
            flops = row.memory.flops
        # Ranks communicate while they compute. Offloads are waited for.
        beside = max((1 + row.waits) * flops / (_EFFICIENCY * device.flops), sent)
        to_disk = 2 * row.on_disk * machines.devices / _TO_DISK
        seconds = beside + 2 * row.on_host / _TO_HOST + to_disk
    return replace(row, fits=machines.fit(row), seconds=seconds)


def _cost(row: PlannedStrategy) -> tuple[Any, ...]:
    """Return what rows are sorted by: of those that fit, the fastest and simplest comes first."""
    if row.memory is None:
        return (2, row.name)
    sent = row.memory.sent * row.ranks_of_batch
    place = 2 if row.on_disk else bool(row.on_host)
    cost = (row.seconds or 0.0) * row.ranks_of_batch if row.cost is None else row.cost
    return (not row.fits, place, cost, len(row.shards), sent, row.name)


def _device(name: str | None, memory: float | str | None, devices: int) -> Device:
    if name is not None:
        found = find_device(name)
        return found if memory is None else replace(found, memory=parse_size(memory))
    if memory is not None:
        return Device("", "auto", parse_size(memory))
    if torch.cuda.is_available():
        return Device("", "cuda", torch.cuda.get_device_properties(0).total_memory)
    return Device("", "cpu", _host_memory() // devices)


def _host_memory() -> int:
    memory = CPUAccelerator().availability().memory
    if memory is None:
        raise ConfigurationError(
            "this machine does not say how much memory it has: pass host_memory='64GB'"
        )
    return memory


def _at(error: BaseException) -> str:
    """Return an error with the last line of the user's code that it came from."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        frame, line = trace.tb_frame, trace.tb_lineno
        file = Path(frame.f_code.co_filename)
        library = frame.f_globals.get("__name__", "").partition(".")[0]
        own = not library.startswith(("torch", "stratagem"))
        if own and not any(map(file.is_relative_to, _LIBRARIES)):
            place = f"{file}:{line}: "
        trace = trace.tb_next
    return f"{place}{type(error).__name__}: {format_text(str(error), 300).rstrip('.')}"
