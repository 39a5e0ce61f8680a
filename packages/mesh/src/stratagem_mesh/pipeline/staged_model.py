"""StagedModel: a model of which each rank runs some stages, with stand-ins for the others."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_mesh.pipeline.analysis import Run, program_of
from stratagem_mesh.pipeline.dry_run import (
    DependentError,
    DryRun,
    State,
    UnitCall,
    attributes_of,
    is_repetition,
    unchanged,
)
from stratagem_mesh.pipeline.objects import flatten, is_object, leaves_of, tensors_in, unflatten
from stratagem_mesh.pipeline.redirection import redirect
from stratagem_mesh.pipeline.skeletons import Skeletons, only_shapes, show_to_hooks
from stratagem_mesh.pipeline.values import Program, Stages, Value

Exchange = Callable[[Value, "Tensor | None"], Tensor]
"""Sends a value of an evaluation, or with None receives it."""

_RECEIVED = "_stratagem_received"
NO_LOSS = (
    "training_step returned None, which skips the micro-batch, and the other stages wait for its "
    "gradients: return a loss for each micro-batch, such as 0.0 times an output"
)
_NO_DATA = "numpy() is not supported for tensor subclasses", "FakeTensor"
"""In errors of torch, where user code reads the data of a tensor that has none."""


class StageEnd(BaseException):
    """Ends user code where a stage has computed all values to send.

    No Exception, so that user code does not catch it.
    """


class StagedModel:
    """A model with units that run on one rank each.

    Made before layers are divided and sharded: dry runs use copies of the units without values.

    Args:
        model: the user's model, whole.
        stages: which unit belongs to which stage.

    Attributes:
        placeholders: the ids of the parameters that stand for parameters of other stages.
        exchange: the exchange of values in calls outside of training steps; None: it refuses them.
        shared: the stages that hold a parameter outside of units, by its name.
    """

    def __init__(self, model: nn.Module, stages: Stages) -> None:
        self.placeholders: set[int] = set()
        self.exchange: Exchange | None = None
        self.shared: dict[str, tuple[int, ...]] = {}
        self._absent: list[tuple[dict[str, Any], str, Tensor]] = []
        """What modules no longer list, with the `_parameters` or `_buffers` of each."""
        self._model = ref(model)
        self._stages = stages
        self._skeletons = Skeletons(model, stages.units)
        self._all: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()
        self._own: frozenset[int] = frozenset(range(stages.count))
        self._in_unit = False
        # The modules with units inside.
        names = stages.units
        self._above = {name[:end] for name in names for end, sign in enumerate(name) if sign == "."}
        self._above.add("")
        self._runs: _Dry | _Forward | _Evaluation | None = None
        self._programs: dict[Any, Program] = {}
        for name in stages.units:
            self._all[name] = unit = model.get_submodule(name)
            redirect(unit, partial(self._answer, name))
        inside = {id(part) for unit in self._all.values() for part in unit.modules()}
        for name, part in model.named_modules():
            if id(part) not in inside:
                redirect(part, partial(self._answer_container, name))
                for key in part._parameters:
                    of_parameter = f"{name}.{key}" if name else key
                    if of_parameter in stages.parameters:
                        self.shared[of_parameter] = stages.parameters[of_parameter]

    @property
    def units(self) -> dict[str, nn.Module]:
        """The units of this rank's stages, by name."""
        of_units = self._stages.units
        return {name: self._all[name] for name in of_units if of_units[name] in self._own}

    def every_unit(self) -> list[nn.Module]:
        """Return the units of all stages."""
        return list(self._all.values())

    def part(self, name: str) -> nn.Module:
        """Return a module of the model by its name; "": the model."""
        model = self._model()
        assert model is not None
        return model.get_submodule(name)

    def _answer(self, name: str, unit: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        runs = self._runs
        if runs is not None:
            return runs.call(name, unit, call, args, kwargs)
        if self._may_evaluate(unit):
            return self._evaluated(name, unit, call, args, kwargs)
        if self._stages.units[name] not in self._own and self._is_absent(unit):
            if is_repetition():
                raise ConfigurationError(
                    f"a module around {name!r} of stage {self._stages.units[name]} is computed "
                    "again in backward on a stage that has not all of it: expected cuts between "
                    "modules with activation checkpointing (pipeline_cuts), or checkpointing of "
                    "smaller modules"
                )
            raise UserCodeError(
                f"the module {name!r} of stage {self._stages.units[name]} was called in training "
                "mode, with gradients, outside of a training step, on a rank that does not have "
                "it: call the model under torch.no_grad() on all ranks, or in training_step"
            )
        for leaf in leaves_of((args, kwargs)):
            if hasattr(leaf, _RECEIVED):  # a repetition by activation checkpointing
                args, kwargs = _replaced((args, kwargs), lambda one: getattr(one, _RECEIVED, one))
                break
        return call(*args, **kwargs)

    def _answer_container(
        self, name: str, part: nn.Module, call: Any, args: Any, kwargs: Any
    ) -> Any:
        runs = self._runs
        if isinstance(runs, _Evaluation):
            return runs.top(name, part, call, args, kwargs)
        if runs is None and name in self._above and self._may_evaluate(part):
            return self._evaluated(name, part, call, args, kwargs)
        return call(*args, **kwargs)

    def _may_evaluate(self, part: nn.Module) -> bool:
        """Whether a call outside of steps needs no gradients, as in `on_train_epoch_end`."""
        needs_gradients = part.training and torch.is_grad_enabled()
        return self.exchange is not None and not self._in_unit and not needs_gradients

    def _evaluated(self, name: str, part: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        """Run a call on all ranks, as an evaluation of its own."""
        assert self.exchange is not None
        with torch.no_grad(), self.evaluating(self._own, self.exchange):
            assert isinstance(self._runs, _Evaluation)
            return self._runs.top(name, part, call, args, kwargs)

    def _is_absent(self, unit: nn.Module) -> bool:
        """Whether another rank has the unit; a unit within a unit of this rank is here, too."""
        return any(
            id(value) in self.placeholders
            for part in unit.modules()
            for value in vars(part).values()
        )

    # -- parameters

    def drop_absent(self, own: Collection[int]) -> None:
        """Free the parameters and buffers of other stages than these.

        Placeholders of the same shape, dtype and device take their places as attributes; the
        module no longer lists them.

        Args:
            own: the stages of this rank.
        """
        self._own = frozenset(own)
        kept = {id(part) for unit in self.units.values() for part in unit.modules()}
        held = self._stages.parameters
        for name, unit in self._all.items():
            for inner, part in unit.named_modules():
                if id(part) not in kept:
                    whole = f"{name}.{inner}" if inner else name
                    read = {
                        key
                        for key in part._parameters
                        if self._own.intersection(held.get(f"{whole}.{key}", ()))
                        and held[f"{whole}.{key}"] == tuple(range(self._stages.count))
                    }
                    self._empty(part, read)

    def _empty(self, part: nn.Module, keep: Collection[str]) -> None:
        for key, parameter in list(part._parameters.items()):
            if parameter is not None and key not in keep:
                del part._parameters[key]
                made = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
                stands = nn.Parameter(made.expand(parameter.shape), parameter.requires_grad)
                stands.__dict__.update(  # attributes that user code has set
                    (k, v) for k, v in vars(parameter).items() if not k.startswith("_stratagem_")
                )
                part.__dict__[key] = stands
                self.placeholders.add(id(stands))
                # Kept also so that no other object has its id.
                self._absent.append((part._parameters, key, stands))
        for key, buffer in list(part._buffers.items()):
            if buffer is not None:
                del part._buffers[key]
                made = torch.zeros((), dtype=buffer.dtype, device=buffer.device)
                part.__dict__[key] = made.expand(buffer.shape)
                self._absent.append((part._buffers, key, part.__dict__[key]))

    @contextmanager
    def listed(self) -> Iterator[None]:
        """Let modules list the placeholders as parameters and buffers in this context."""
        for held, key, stands in self._absent:
            held[key] = stands
        try:
            yield
        finally:
            for held, key, _ in self._absent:
                del held[key]

    # -- dry runs

    def program(self, call: Callable[[], Any], batch: Any, *, trains: bool) -> Program:
        """Return the values that stages exchange in a run of user code.

        Args:
            call: the user code, which runs once if batches of these shapes are new.
            batch: the batch that it reads.
            trains: whether the run is of a training step.

        Raises:
            ConfigurationError: user code reads a value that no stage can send.
            UserCodeError: user code depends on values of one stage before the next has run.
        """
        return self._program(("step", _code(call), trains, _shapes(batch)), call, to_all=False)

    def _program(self, key: Any, call: Callable[[], Any], *, to_all: bool) -> Program:
        kind = next(self.part("").parameters(), torch.empty(0)).device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (*key, self.part("").training, torch.is_grad_enabled(), autocast)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._dry_run(call, to_all=to_all)
        return program

    def _dry_run(self, call: Callable[[], Any], *, to_all: bool) -> Program:
        model = self.part("")
        self._skeletons.follow(self.units)
        with unchanged(model), only_shapes(model, self._skeletons) as names:
            before = attributes_of(model)
            program, state = self._run_without_values(call, names, before, {}, to_all=to_all)
            if state and not to_all:  # the next micro-batch reads it
                self._run_without_values(call, names, before, state, to_all=to_all)
        return replace(program, state=tuple(dict.fromkeys(state.values())))

    def _run_without_values(
        self,
        call: Callable[[], Any],
        names: Mapping[int, str],
        before: Any,
        state: Mapping[int, State],
        *,
        to_all: bool,
    ) -> tuple[Program, dict[int, State]]:
        """Return the program of a run, and the attributes outside of units that it sets.

        Args:
            call: user code.
            names: of the parameters and buffers of units, by their ids.
            before: the attributes of modules before the first run.
            state: the attributes that an earlier run set.
            to_all: every stage reads the result.
        """
        run = DryRun(self._stages.units, self._skeletons, names, state)
        runs, self._runs = self._runs, _Dry(run)
        result, is_partial = None, False
        try:
            with run:
                result = call()
        except Exception as error:
            is_partial = True
            self._check_end(run, error, to_all=to_all)
        finally:
            self._runs = runs
            run.restore()
        if result is None and not is_partial and not to_all:
            raise UserCodeError(NO_LOSS)
        if not to_all and 1 < len(self._own) < self._stages.count:
            _refuse_changes(run.changed(self.part(""), before), len(self._own))
        found = run.state_set(self.part(""), before)
        made = program_of(run, self._stages, result, to_all=to_all, is_partial=is_partial)
        return made, found

    def _check_end(self, run: DryRun, error: Exception, *, to_all: bool) -> None:
        """Accept the end of a dry run by an error, where all stages have run.

        Raises:
            UserCodeError: user code needs values earlier.
        """
        reached = {one.stage for one in run.calls}
        missing = set(range(self._stages.count)) - reached
        has_no_data = any(sign in str(error) for sign in _NO_DATA)
        if not isinstance(error, DependentError) and not has_no_data:
            raise error
        if missing or to_all:
            place = getattr(error, "place", "user code")
            stage = max(reached, default=0)
            of_units = self._stages.units.items()
            waiting = ", ".join(repr(name) for name, of in of_units if of in missing)
            raise UserCodeError(
                f"{place} reads a value of stage {stage} by {error}, and the stages of a pipeline "
                "cannot follow what user code decides by it: expected control flow between "
                "modules that depends on the batch and on shapes alone. Compute it inside of a "
                "module, or cut elsewhere (pipeline_cuts)"
                + (f". Not run before: {waiting}" if waiting else "")
            ) from error

    # -- runs

    def forward(
        self,
        program: Program,
        stage: int,
        received: Mapping[Value, Tensor],
        call: Callable[[], Any],
    ) -> tuple[Any, dict[Value, Tensor], bool]:
        """Run user code as a stage of a training step.

        Args:
            program: of `program`, for the batch.
            stage: the stage.
            received: the values that it reads.
            call: the user code.

        Returns:
            Its result, the values that the stage sends, and whether it has ended before its end.

        Raises:
            UserCodeError: user code calls other modules than in the dry run.
        """
        before, self._runs = self._runs, (runs := _Forward(self, program, stage, received))
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        result, is_interrupted = None, False
        try:
            result = call()
        except StageEnd:
            is_interrupted = True
        finally:
            self._runs = before
            torch.backends.mha.set_fastpath_enabled(fast_path)
        missing = [value.key[1] for value in program.sends(stage) if value not in runs.sent]
        if missing:
            raise UserCodeError(
                f"user code ended before stage {stage} had called {missing[0]!r}, whose tensors "
                "other stages read: expected the same calls as in the run without values for "
                "batches of these shapes"
            )
        return result, runs.sent, is_interrupted

    @contextmanager
    def evaluating(self, own: Collection[int], exchange: Exchange) -> Iterator[None]:
        """Run calls of the model on all ranks: each unit on its own, its values sent to others.

        Args:
            own: the stages of this rank.
            exchange: sends a value to the stages that read it, or receives it.
        """
        before, self._runs = self._runs, _Evaluation(self, frozenset(own), exchange)
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            self._runs = before
            torch.backends.mha.set_fastpath_enabled(fast_path)


class _Dry:
    def __init__(self, run: DryRun) -> None:
        self._run = run

    def call(self, name: str, unit: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        return self._run.call(name, unit, args, kwargs)


class _Running(ABC):
    """Answers the calls of units as a program says.

    Args:
        staged: the model.
        own: the stages that run.
    """

    def __init__(self, staged: StagedModel, own: frozenset[int]) -> None:
        self._staged = staged
        self._own = own
        self._run: Run
        self._numbers: dict[str, int] = {}

    @abstractmethod
    def get(self, value: Value) -> Tensor:
        """Return a value that other stages compute."""

    @abstractmethod
    def put(self, value: Value, tensor: Tensor) -> None:
        """Send a value of an own stage."""

    def end(self, amount: int) -> None:
        """Count the calls and values of an own stage."""

    def call(self, name: str, unit: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        """Run a unit of an own stage, or return stand-ins of the results of another."""
        run = self._run
        number = self._numbers.get(name, 0)
        self._numbers[name] = number + 1
        place = name, number
        noted = run.calls.get(place)
        if noted is None:
            raise UserCodeError(
                f"the module {name!r} was called more often than in the run without values that "
                "found what stages exchange, for a batch of the same shapes: expected control flow "
                "between modules that depends on shapes alone. Pad, or compute it in a module"
            )
        of_arguments = run.arguments.get(place)
        if of_arguments:
            args, kwargs = self._exchanged(noted, of_arguments, args, kwargs)
        if noted.stage not in self._own:
            self.end(0)
            output = self._stand_in(noted, place, args, kwargs)
            show_to_hooks(unit, args, kwargs, output)
            return output
        staged, before = self._staged, self._staged._runs
        staged._runs, staged._in_unit = None, True
        try:
            output = call(*args, **kwargs)
        finally:
            staged._runs, staged._in_unit = before, False
        of_outputs = run.outputs.get(place)
        if of_outputs:
            made = leaves_of(output)
            for index, value in of_outputs:
                tensor = made[index]
                _check_shape(name, value, tensor)
                self.put(value, tensor.clone() if value.key in run.changed else tensor)
        self.end(1)
        return output

    def _exchanged(
        self, noted: UnitCall, of_arguments: list[tuple[int, Value]], args: Any, kwargs: Any
    ) -> Any:
        """Send arguments that an own stage has computed, or receive them."""
        leaves, spec = flatten((args, kwargs))
        given = list(leaves)
        taken: dict[Value, Tensor] = {}
        put: set[Value] = set()
        for index, value in of_arguments:
            local = leaves[index]
            if value.stage in self._own:
                if value not in put:
                    _check_shape(noted.unit, value, local)
                    self.put(value, local)
                    self.end(1)
                put.add(value)
            elif noted.stage in self._own:
                if value not in taken:
                    taken[value] = self.get(value)
                if (noted.unit, noted.number, index) in self._run.kept:
                    local.copy_(taken[value])
                    leaves[index] = local
                else:
                    if noted.is_repeated:
                        setattr(local, _RECEIVED, taken[value])
                    leaves[index] = taken[value]
        return unflatten(given, leaves, spec)

    def _stand_in(self, noted: UnitCall, place: Any, args: Any, kwargs: Any) -> Any:
        """Return values for the results of a unit of another stage."""
        received = {
            index: self.get(value)
            for index, value in self._run.outputs.get(place, ())
            if not self._own.isdisjoint(value.readers)
        }
        given = None
        leaves: list[Any] = []
        count = noted.spec.num_leaves
        for index, leaf in enumerate(noted.leaves):
            is_changed = ("output", *place, index) in self._run.changed
            if index in received:
                leaves.append(received[index].clone() if is_changed else received[index])
            elif leaf[0] == "argument":
                given = leaves_of((args, kwargs)) if given is None else given
                leaves.append(given[leaf[1]])
            elif leaf[0] == "output":
                leaves.append(leaves[leaf[1]])
            elif leaf[0] == "object":
                leaves.append(leaf[1])
            elif leaf[0] == "kept":
                leaves.append(_tensors_of_objects(leaves[:count])[leaf[1]])
            elif leaf[0] == "copy":
                leaves.append(copy.deepcopy(leaf[1]))
            elif is_changed:
                leaves.append(torch.zeros(leaf[0], dtype=leaf[1], device=leaf[2]))
            else:
                shape, dtype, device = leaf
                leaves.append(torch.zeros((), dtype=dtype, device=device).expand(shape))
        objects = [
            tensor for leaf in leaves[:count] if is_object(leaf) for tensor in tensors_in(leaf)
        ]
        return unflatten([*leaves[:count], *objects], leaves, noted.spec)


class _Forward(_Running):
    """Runs one stage of a training step."""

    def __init__(
        self, staged: StagedModel, program: Program, stage: int, received: Mapping[Value, Tensor]
    ) -> None:
        super().__init__(staged, frozenset([stage]))
        self.sent: dict[Value, Tensor] = {}
        self._run = program.run
        self._received = received
        self._left = self._run.work[stage]
        self._is_last = stage == staged._stages.count - 1

    def get(self, value: Value) -> Tensor:
        return self._received[value]

    def put(self, value: Value, tensor: Tensor) -> None:
        self.sent[value] = tensor

    def end(self, amount: int) -> None:
        self._left -= amount
        if self._left <= 0 and not self._is_last:
            raise StageEnd


class _Evaluation(_Running):
    """Runs each call of the model that user code makes as a program of its own."""

    def __init__(self, staged: StagedModel, own: frozenset[int], exchange: Exchange) -> None:
        super().__init__(staged, own)
        self._exchange = exchange
        self._is_inside = False

    def get(self, value: Value) -> Tensor:
        return self._exchange(value, None)

    def put(self, value: Value, tensor: Tensor) -> None:
        if not self._own.issuperset(value.readers):
            self._exchange(value, tensor)

    def top(self, name: str, part: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        """Run a call of the model, or of one part, from user code."""
        if self._is_inside:
            return call(*args, **kwargs)
        staged = self._staged
        if torch.is_grad_enabled() and part.training:
            raise UserCodeError(
                f"{name or type(part).__name__!r} was called in training mode, with gradients, "
                "outside of a training step: call it under torch.no_grad(), or in training_step"
            )
        _refuse_caches(name, (args, kwargs))
        key = "call", name, part.training, _shapes((args, kwargs))

        def without_values() -> Any:
            own_args, own_kwargs = _copy_of((args, kwargs))
            return part(*own_args, **own_kwargs)

        program = staged._program(key, without_values, to_all=True)
        self._run, self._numbers, self._is_inside = program.run, {}, True
        try:
            if name in staged._all:
                return super().call(name, part, call, args, kwargs)
            return call(*args, **kwargs)
        finally:
            self._is_inside = False

    def call(self, name: str, unit: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        """Run a unit, which is a call of its own if user code calls it."""
        answer = super().call if self._is_inside else self.top
        return answer(name, unit, call, args, kwargs)


def _refuse_changes(names: Sequence[str], runs: int) -> None:
    """Refuse user code that changes state, where it runs several times for a micro-batch.

    Raises:
        ConfigurationError: it changes state.
    """
    if names:
        raise ConfigurationError(
            f"training_step changes {', '.join(map(repr, names))}, and with virtual_stages={runs} "
            f"it runs {runs} times on each rank for a micro-batch: change state in "
            'on_train_batch_end, or use schedule="1f1b"'
        )


def _check_shape(name: str, value: Value, tensor: Tensor) -> None:
    if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
        raise UserCodeError(
            f"the module {name!r} made a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} "
            f"that other stages read, expected {value.shape} and {value.dtype} as in the run "
            "without values for batches of the same shapes: its results may depend on shapes alone"
        )


def _refuse_caches(name: str, data: Any) -> None:
    """Refuse a cache of keys and values: each rank would have the part of its own stages."""
    for leaf in tree_leaves(data):
        if hasattr(leaf, "get_seq_length"):
            raise UserCodeError(
                f"{name or 'the model'} was called with a {type(leaf).__name__}, of which each "
                "stage of a pipeline has the entries of its own layers alone: pass use_cache=False"
            )


def _copy_of(data: Any) -> Any:
    """Return a copy of arguments and their objects, with the same tensors."""
    memo = {id(leaf): leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor)}
    try:
        return copy.deepcopy(data, memo)
    except Exception:
        return data


def _tensors_of_objects(leaves: list[Any]) -> list[Tensor]:
    return [tensor for leaf in leaves if is_object(leaf) for tensor in tensors_in(leaf)]


def _replaced(data: Any, change: Callable[[Any], Any]) -> Any:
    leaves, spec = flatten(data)
    return unflatten(leaves, [change(leaf) for leaf in leaves], spec)


def _code(call: Any, depth: int = 0) -> Any:
    """Return a key of a function, equal for each way to bind it.

    It has the code of functions that the function refers to, such as a loss of the user's.
    """
    if isinstance(call, partial):
        return _code(call.func, depth), tuple(_code_in(one, depth) for one in call.args)
    if isinstance(call, MethodType):
        return _code(call.__func__, depth), _code_in(call.__self__, depth)
    if isinstance(call, FunctionType):
        cells = [cell.cell_contents for cell in call.__closure__ or () if _is_filled(cell)]
        return call.__code__, tuple(_code_in(one, depth) for one in cells)
    return type(call)


def _code_in(value: Any, depth: int) -> Any:
    if isinstance(value, (bool, int, str, type(None))):
        return value
    if depth < 3 and isinstance(value, (FunctionType, MethodType, partial)):
        return _code(value, depth + 1)
    # A micro-batch of a front end, and its step.
    inside = vars(value) if depth < 3 and hasattr(value, "__dict__") else {}
    return type(value), *(
        _code_in(inside[key], depth + 1) for key in ("_step", "_loss") if key in inside
    )


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _shapes(data: Any, depth: int = 0) -> Any:
    """Return a key of a batch: its structure, shapes and plain data."""
    leaves, spec = tree_flatten(data)
    return str(spec), tuple(_shape(leaf, depth) for leaf in leaves)


def _shape(leaf: Any, depth: int) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, (bool, int, float, str, bytes, type(None), torch.dtype)):
        return leaf
    if hasattr(leaf, "__dict__") and depth < 3 and not isinstance(leaf, nn.Module):
        return type(leaf), _shapes(dict(vars(leaf)), depth + 1)
    return type(leaf)
