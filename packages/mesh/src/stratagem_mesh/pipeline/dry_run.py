"""A run of user code without values: which tensors follow from which units of a model.

Units are replaced by skeletons, copies with parameters that have shapes and no values. So their
results are fake tensors, and those of operations on them, too. Operations on values of the batch
alone run as they are, and user code may depend on their results.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import stratagem
from stratagem.errors import ConfigurationError
from stratagem_mesh.pipeline.objects import (
    PLAIN,
    copy_of,
    crosses,
    flatten,
    is_object,
    leaves_of,
    tensors_in,
)
from stratagem_mesh.pipeline.skeletons import DEPENDENT, Skeletons, call_hooks

Meta = tuple[tuple[int, ...], torch.dtype, bool]
"""The shape and the dtype of a tensor, and whether it has a gradient."""

_NOT_USER_CODE = (
    *(str(Path(module.__file__).parent) for module in (torch, stratagem) if module.__file__),
    str(Path(__file__).parent),
)


@dataclass(eq=False)
class Node:
    """A tensor of a dry run that follows from a unit.

    Attributes:
        kind: "output" of a unit, or of an "operation" of user code; "inner": a tensor of a unit's
            forward that is not returned; "changed": an argument that a unit has changed; a
            "parameter" or buffer of a unit; "state": a tensor that user code has set from values of
            stages in the micro-batch before.
        stage: the newest stage that it follows from; -1: no stage.
        time: the index of the operation or call.
        inputs: the tensors that it follows from, of an operation.
        key, meta: of an output: ("output", unit, call, leaf), and its shape, dtype and gradient.
        name: the name of the operation, the unit, or the parameter.
        place: the file and the line of user code.
        is_random: whether the operation draws numbers.
        is_changed: whether user code changes the output in place.
        readers: the number of operations and units that read it.
    """

    kind: Literal["output", "operation", "inner", "changed", "parameter", "state"]
    stage: int
    time: int
    inputs: tuple[Node, ...] = ()
    key: tuple[Any, ...] | None = None
    meta: Meta | None = None
    name: str = ""
    place: str = ""
    is_random: bool = False
    is_changed: bool = False
    readers: int = 0


@dataclass(eq=False)
class UnitCall:
    """A call of a unit in a dry run.

    Attributes:
        unit, number: the name of the unit, and the index of its call.
        stage: the stage of the unit.
        time: the index in the order of operations and calls.
        arguments: the nodes of its arguments, by the index of the leaf.
        given: the shape, the dtype and the gradient of these.
        writable: the leaves of these that a stage may overwrite by received tensors.
        is_repeated: whether user code repeats the call in backward.
        outputs: the nodes of its results, by the index of the leaf.
        leaves: the results of a stand-in: (shape, dtype, device), ("argument", index),
            ("output", index), ("object", value), ("copy", object), or ("kept", index) for a tensor
            in a copied object that does not cross.
        spec: the structure of the result.
        read, made: the nodes of autograd of the arguments and of the results, by the leaf.
        flops: the number of floating-point operations, if a counter runs.
    """

    unit: str
    number: int
    stage: int
    time: int
    arguments: dict[int, Node] = field(default_factory=dict)
    given: dict[int, Meta] = field(default_factory=dict)
    writable: set[int] = field(default_factory=set)
    is_repeated: bool = False
    outputs: dict[int, Node] = field(default_factory=dict)
    leaves: list[Any] = field(default_factory=list)
    spec: Any = None
    read: dict[int, Any] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)
    flops: float = 0.0


@dataclass(frozen=True)
class State:
    """A tensor outside of units that user code sets from values of stages.

    The last stage runs user code to its end, with all values, so that it has the tensor.

    Attributes:
        part, name: the name of its module, and of the attribute.
        is_shared: whether the attribute was a tensor of this shape before the run, such as a
            buffer: other stages receive it after the step.
    """

    part: str
    name: str
    is_shared: bool

    def __str__(self) -> str:
        return f"{self.part}.{self.name}" if self.part else self.name


class DependentError(Exception):
    """User code depends on values that a dry run does not have.

    Attributes:
        place: the file and the line.
    """

    def __init__(self, operation: str) -> None:
        super().__init__(operation)
        self.place = place_of_user_code()


class DryRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the calls of units and the operations of user code around them.

    Args:
        units: the stage of each unit.
        skeletons: the units without values.
        parameters: the names of the units' parameters and buffers, by the ids of the tensors in
            the model.
        state: the attributes that an earlier run set, by the ids of the tensors.

    Attributes:
        calls: the calls of units.
        operations: the results of operations of user code.
        drawn: the times at which user code draws random numbers.
    """

    def __init__(
        self,
        units: Mapping[str, int],
        skeletons: Skeletons,
        parameters: Mapping[int, str],
        state: Mapping[int, State] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state or {}
        self._units = units
        self._skeletons = skeletons
        self._parameters = parameters
        self._nodes = WeakIdKeyDictionary()
        self._written: dict[int, list[Node]] = {}
        """The changes of a storage."""
        self._owners: dict[int, Node] = {}
        """The output of a unit that has a storage."""
        self._before: list[tuple[Tensor, Tensor]] = []
        """The values of the batch and the model that user code changes in place."""
        self._made: dict[int, int] = {}
        """The times at which user code has made storages that follow from no unit."""
        self._written_at: dict[int, int] = {}
        """The times of the latest changes of tensors that existed before, by their ids."""
        self._in_unit = False
        self._time = 0
        self._numbers: dict[str, int] = {}
        self._alive: list[tuple[Any, Node]] = []
        self._storages: list[Any] = []
        self.calls: list[UnitCall] = []
        self.operations: list[Node] = []
        self.drawn: list[int] = []
        self.counter: Any = None

    # -- operations of user code

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._in_unit or function.namespace == "prim":
            return function(*args, **kwargs)
        self._time += 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inputs = tuple(dict.fromkeys(node for leaf in given for node in self.nodes(leaf)))
        if inputs and _reads(function, given):  # a simulation of a step would return a value
            raise DependentError(str(function))
        written = list(_written(function, args, kwargs))
        for tensor in written:
            self._keep(tensor)
        try:
            output = function(*args, **kwargs)
        except DEPENDENT as error:
            raise DependentError(str(function)) from error
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        if is_random:
            self.drawn.append(self._time)
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if inputs:
            self._note(function, inputs, written, leaves, is_random)
        else:
            known = {_storage(leaf) for leaf in given}
            for leaf in leaves:
                if leaf.layout is torch.strided and (key := _storage(leaf)) not in known:
                    self._made[key] = self._time
                    self._storages.append(leaf.untyped_storage())
        return output

    def _note(self, function: Any, inputs: Any, written: Any, leaves: Any, is_random: bool) -> None:
        for one in inputs:
            one.readers += 1
        stage = max(one.stage for one in inputs)
        node = Node(
            *("operation", stage, self._time, inputs),
            name=str(function),
            place=place_of_user_code(),
            is_random=is_random,
        )
        self.operations.append(node)
        for tensor in written:
            key = _storage(tensor)
            self._storages.append(tensor.untyped_storage())
            self._written.setdefault(key, []).append(node)
            if key in self._owners:
                self._owners[key].is_changed = True
        for leaf in (*written, *leaves):
            self._nodes[leaf] = node

    def _keep(self, tensor: Tensor) -> None:
        """Note the values of a tensor that existed before, since user code will run again."""
        has_values = not tensor.is_meta and not isinstance(tensor, FakeTensor)
        if has_values and _storage(tensor) not in self._made:
            self._before.append((tensor, tensor.detach().clone()))
            self._written_at[id(tensor)] = self._time

    def restore(self) -> None:
        """Undo the changes of tensors that existed before."""
        with torch.no_grad():
            for tensor, values in reversed(self._before):
                tensor.copy_(values)

    def nodes(self, tensor: Tensor) -> list[Node]:
        """Return the node of a tensor, and later changes of its storage."""
        node: Node | None = self._nodes.get(tensor)  # type: ignore[no-untyped-call]
        if node is None and id(tensor) in self._parameters:
            node = Node("parameter", -1, 0, name=self._parameters[id(tensor)])
            self._nodes[tensor] = node
        elif node is None and id(tensor) in self._state:
            state = self._state[id(tensor)]
            node = Node("state", -1, 0, name=str(state))
            self._nodes[tensor] = node
        found = [] if node is None else [node]
        if self._written and tensor.layout is torch.strided:
            time = -1 if node is None else node.time
            changes = self._written.get(_storage(tensor), ())
            found += [each for each in changes if each.time > time]
        return found

    # -- calls of units

    def call(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a unit without values, and note its call."""
        number = self._numbers.get(name, 0)
        self._numbers[name] = number + 1
        self._time += 1
        call = UnitCall(name, number, self._units[name], self._time)
        given = leaves_of((args, kwargs))
        self._note_arguments(call, given)
        inside = _Inside(self, call, given)
        modes = (inside,) if self.counter is None else (self.counter, inside)
        self._in_unit = True
        try:
            output = self._skeletons.call(name, unit, args, kwargs, *modes)
        except DEPENDENT as error:
            raise DependentError(f"the module {name!r}") from error
        finally:
            self._in_unit = False
        if self.counter is not None:
            call.flops = float(self.counter.get_total_flops())  # it starts anew at each call
        _check_arguments(name, given, leaves_of((args, kwargs)))
        self._note_changes(call, given, inside)
        self._note_outputs(call, given, output, inside)
        before = len(self.operations)
        result = call_hooks(unit, args, kwargs, output)
        made = call.outputs.values()
        if result is not output or any(node.is_changed for node in made):
            for node in made:  # the results of the hooks cross
                node.kind, node.is_changed = "inner", False
            of_hooks = self.operations[before:]
            self.operations[before:] = [node for node in of_hooks if node.readers]
            call.outputs, call.leaves, call.made = {}, [], {}
            self._note_outputs(call, given, result, inside)
        self.calls.append(call)
        return result

    def _note_arguments(self, call: UnitCall, given: list[Any]) -> None:
        call.is_repeated = _is_checkpointed(call.unit)
        for index, leaf in enumerate(given):
            if not isinstance(leaf, Tensor):
                continue
            nodes = self.nodes(leaf)
            for node in nodes:
                node.readers += 1
            if len(nodes) == 1:
                call.arguments[index] = nodes[0]
            elif nodes:
                stage = max(node.stage for node in nodes)
                call.arguments[index] = Node("operation", stage, call.time, tuple(nodes))
            if nodes:
                call.given[index] = _meta(leaf)
                if leaf.requires_grad:
                    call.read[index] = get_gradient_edge(leaf).node
                is_own = not _overlaps(leaf) and _storage(leaf) not in self._owners
                if is_own and not call.is_repeated:
                    call.writable.add(index)

    def _note_changes(self, call: UnitCall, given: list[Any], inside: _Inside) -> None:
        for index in inside.changed:
            leaf = given[index]
            node = Node("changed", call.stage, call.time, name=call.unit)
            self._storages.append(leaf.untyped_storage())
            self._written.setdefault(_storage(leaf), []).append(node)
            self._nodes[leaf] = node

    def _note_outputs(self, call: UnitCall, given: list[Any], output: Any, inside: _Inside) -> None:
        leaves, call.spec = flatten(output)
        places = {id(leaf): i for i, leaf in enumerate(given) if i not in inside.changed}
        opaque = {
            id(tensor)
            for leaf in leaves[: call.spec.num_leaves]
            if is_object(leaf) and not crosses(leaf)
            for tensor in tensors_in(leaf)
        }
        seen: dict[int, int] = {}
        for index, leaf in enumerate(leaves):
            is_inside = index >= call.spec.num_leaves
            if isinstance(leaf, Tensor) and id(leaf) in seen:
                call.leaves.append(("output", seen[id(leaf)]))
            elif isinstance(leaf, PLAIN):
                call.leaves.append(("object", leaf))
            elif id(leaf) in places and (isinstance(leaf, Tensor) or not is_object(leaf)):
                call.leaves.append(("argument", places[id(leaf)]))
            elif is_inside and id(leaf) in opaque:
                call.leaves.append(("kept", index - call.spec.num_leaves))
            elif isinstance(leaf, Tensor):
                seen[id(leaf)] = index
                self._note_output(call, index, leaf)
            else:
                call.leaves.append(("copy", _empty_copy(leaf, call.unit)))

    def _note_output(self, call: UnitCall, index: int, leaf: Tensor) -> None:
        key = "output", call.unit, call.number, index
        node = Node("output", call.stage, call.time, key=key, meta=_meta(leaf), name=call.unit)
        self._nodes[leaf] = call.outputs[index] = node
        if leaf.layout is torch.strided:
            self._written.pop(_storage(leaf), None)
        if leaf.requires_grad:
            call.made[index] = get_gradient_edge(leaf).node
        self._alive.append((ref(leaf), node))
        if leaf.layout is torch.strided:
            self._storages.append(leaf.untyped_storage())
            self._owners[_storage(leaf)] = node
        call.leaves.append((tuple(leaf.shape), leaf.dtype, leaf.device))

    def changed(self, model: nn.Module, before: Mapping[str, Any]) -> list[str]:
        """Return the names of the attributes and tensors outside of units that this run changed.

        Args:
            model: the user's model.
            before: the attributes of its modules before the run.
        """
        written = {id(tensor) for tensor, _ in self._before}
        found: dict[str, None] = {}
        for path, held, known in self._outside(model, before):
            for name, value in held.items():
                old = known.get(name)
                is_new = isinstance(value, Tensor) and value is not old
                is_new |= isinstance(value, (bool, int, float, str)) and value != old
                if is_new or id(value) in written:
                    found[f"{path}.{name}" if path else name] = None
                    written.discard(id(value))
        return [*found, *(["a tensor of the batch"] if written else [])]

    def _outside(
        self, model: nn.Module, before: Mapping[str, Any]
    ) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
        """Yield each module outside of units with its attributes, now and before."""
        units = [model.get_submodule(name) for name in self._units]
        inside = {part for unit in units for part in unit.modules()}
        for path, part in model.named_modules():
            if part not in inside and not is_metric(part):
                for held, known in zip((vars(part), part._buffers), before[path], strict=True):
                    own = {name: held[name] for name in held if name not in _OF_MODULES}
                    yield path, own, known

    def state_set(self, model: nn.Module, before: Mapping[str, Any]) -> dict[int, State]:
        """Return the tensors outside of units that this run set from values of stages, or late.

        Args:
            model: the user's model.
            before: the attributes of its modules before the run.

        Returns:
            The attributes, by the id of the tensor.
        """
        found: dict[int, State] = {}
        # Stages that end before do not run later operations.
        cut = min((call.time for call in self.calls if call.stage > 0), default=self._time)
        for path, held, known in self._outside(model, before):
            for name, value in held.items():
                old = known.get(name)
                for tensor in _held(value):
                    nodes = [node for node in self.nodes(tensor) if node.kind != "parameter"]
                    time = self._written_at.get(id(tensor), 0)
                    if value is not old and tensor.layout is torch.strided:
                        time = max(time, self._made.get(_storage(tensor), 0))
                    if time > cut or any(node.stage >= 0 for node in nodes):
                        is_shared = isinstance(old, Tensor) and old.shape == tensor.shape
                        found[id(tensor)] = State(path, name, is_shared)
        return found

    def read_parameters(self) -> set[str]:
        """Return the names of units' parameters that user code has read."""
        inputs = (one for node in self.operations for one in node.inputs)
        return {node.name for node in inputs if node.kind == "parameter"}

    def mark_gradients(self, results: Iterable[Tensor]) -> None:
        """Note the tensors without a gradient: no result follows from them by autograd.

        Args:
            results: the results of user code; empty: any tensor may be the loss.
        """
        by_made: dict[Any, list[UnitCall]] = {}
        for call in self.calls:
            for made in call.made.values():
                by_made.setdefault(made, []).append(call)
        pending: list[Any] = [get_gradient_edge(t).node for t in results if t.requires_grad]
        is_known, seen = bool(pending), set()
        while pending:
            node = pending.pop()
            if node is not None and node not in seen:
                seen.add(node)
                pending += [following for following, _ in node.next_functions]
                pending += [one for call in by_made.get(node, ()) for one in call.read.values()]
        for call in self.calls:
            for index, node in call.read.items():
                if is_known and node not in seen:
                    call.given[index] = (*call.given[index][:2], False)
            for index, node in call.made.items():
                output = call.outputs[index]
                if is_known and node not in seen and output.meta is not None:
                    output.meta = (*output.meta[:2], False)
            call.read.clear()
            call.made.clear()

    def alive(self) -> list[Node]:
        """Return the outputs of units that user code still refers to."""
        return [node for reference, node in self._alive if reference() is not None]


_OF_MODULES = frozenset(vars(nn.Module()))


def _held(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors in containers; other objects are not entered."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, deque, Mapping)) and depth < 3:
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _held(one, depth + 1)


def is_metric(part: nn.Module) -> bool:
    """Whether a module is a metric of torchmetrics, of which the ranks of one stage have states."""
    return any(kind.__module__ == "torchmetrics.metric" for kind in type(part).__mro__)


def attributes_of(model: nn.Module) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the attributes and the buffers of each module by its name, for `DryRun.state_set`."""
    # Not by the module: a metric of torchmetrics has another hash after an update.
    named = model.named_modules()
    return {name: (dict(vars(part)), dict(part._buffers)) for name, part in named}


class _Inside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of a unit's forward.

    Attributes:
        changed: the leaves of the arguments that it changes in place.
    """

    def __init__(self, run: DryRun, call: UnitCall, given: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self._node = Node("inner", call.stage, call.time, name=call.unit)
        self._given: dict[int, int] = {}
        self.changed: set[int] = set()
        self.watch(given)

    def watch(self, given: list[Any]) -> None:
        """Note the leaves of the arguments of the call, or values in their places."""
        self._given |= {
            _storage(leaf): index
            for index, leaf in enumerate(given)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
        }

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _written(function, args, kwargs):
            index = self._given.get(_storage(tensor))
            if index is not None:
                self.changed.add(index)
        output = function(*args, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf not in self._run._nodes:
                self._run._nodes[leaf] = self._node
        return output


def _reads(function: Any, given: Iterable[Tensor]) -> bool:
    """Whether an operation returns values of tensors that have none."""
    return torch.Tag.data_dependent_output in function.tags and any(
        isinstance(tensor, FakeTensor) and tensor.constant is None for tensor in given
    )


def _meta(tensor: Tensor) -> Meta:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else -id(tensor)


def _empty_copy(value: Any, unit: str) -> Any:
    """Return a copy of an object, such as a cache, with zeros without memory as its tensors.

    Raises:
        ConfigurationError: it cannot be copied.
    """
    changes: dict[int, Any] = {}
    for tensor in tensors_in(value):
        zero = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        changes[id(tensor)] = zero.expand(tensor.shape)
    return copy_of(value, changes, f"the module {unit!r}")


def _check_arguments(unit: str, given: list[Any], after: list[Any]) -> None:
    """Refuse a unit that puts tensors into an argument: other stages would not have them.

    Raises:
        ConfigurationError: the arguments have other tensors after the call.
    """
    before = [id(leaf) for leaf in given if isinstance(leaf, Tensor)]
    if before != [id(leaf) for leaf in after if isinstance(leaf, Tensor)]:
        raise ConfigurationError(
            f"the module {unit!r} puts tensors into an argument, such as a list or an object, "
            "which other stages of a pipeline would not find there: expected a module that "
            "returns them"
        )


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, so that no operation can write into the tensor."""
    return any(
        size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the arguments that an operation changes."""
    schema = function._schema
    if not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_of_user_code() -> str:
    """Return the file and the line of user code that runs."""
    for frame in _frames():
        name = frame.f_code.co_filename
        if not name.startswith((*_NOT_USER_CODE, "<")) and "stratagem_" not in name:
            return f"{name}:{frame.f_lineno}"
    return "user code"


def is_repetition() -> bool:
    """Whether torch's activation checkpointing computes something again."""
    return any(
        frame.f_code.co_name == "recompute_fn"
        and frame.f_code.co_filename.endswith("torch/utils/checkpoint.py")
        for frame in _frames()
    )


def _is_checkpointed(unit: str) -> bool:
    """Whether user code calls a unit within torch's activation checkpointing.

    Raises:
        ConfigurationError: the checkpointing is of the reentrant kind, under which the stages
            have no gradients.
    """
    found = False
    for frame in _frames():
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            found = True
            if frame.f_code.co_name == "forward":  # of CheckpointFunction
                raise ConfigurationError(
                    f"the module {unit!r} is called by checkpoint(..., use_reentrant=True) at "
                    f"{place_of_user_code()}, which gives a pipeline no gradients: expected "
                    "use_reentrant=False"
                )
    return found


# -- state that a run leaves unchanged


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the states of random numbers, and attributes of modules that user code changes."""
    kept = [_Kept(vars(part)) for part in model.modules()]
    numpy = sys.modules.get("numpy")
    drawn = random.getstate(), numpy.random.get_state() if numpy else None
    fast_path = torch.backends.mha.get_fastpath_enabled()
    cached = torch.is_autocast_cache_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.set_autocast_cache_enabled(False)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True  # errors are raised as well
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            # Of torch, as it makes fake tensors.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            yield
    finally:
        log.disabled = was_disabled
        torch.set_autocast_cache_enabled(cached)
        torch.backends.mha.set_fastpath_enabled(fast_path)
        random.setstate(drawn[0])
        if numpy:
            numpy.random.set_state(drawn[1])
        for one in kept:
            one.restore()


class _Kept:
    """The attributes of an object, and the contents of containers in them."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes
        self._values = dict(attributes)
        self._containers: list[tuple[Any, Any]] = []
        for value in attributes.values():
            self._keep(value, 0)

    def _keep(self, value: Any, depth: int) -> None:
        if isinstance(value, (list, dict, set, deque)) and depth < 3:
            try:
                self._containers.append((value, value.copy()))
            except Exception:  # a class of the user's that does not allow it
                return
            inside = value.values() if isinstance(value, dict) else value
            for one in inside:
                self._keep(one, depth + 1)

    def restore(self) -> None:
        self._attributes.clear()
        self._attributes.update(self._values)
        for container, content in self._containers:
            if len(container) == len(content) and all(
                one is other for one, other in zip(_items(container), _items(content), strict=True)
            ):
                continue
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(content)
            else:
                container.update(content)


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [one for pair in container.items() for one in pair]
    return list(container)
